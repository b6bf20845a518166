"""The bytes of tensors, each storage counted once, from its birth to its death.

Operators are watched and not allocators: real tensors and fake ones are counted alike, and nobody's peak is set back.
What an operator takes inside itself and gives back at its end isn't seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from offstage.stages.empty_init.deciding import is_of_integers
from offstage.stages.empty_init.fake_weights import Faking


class LiveStorages:
    """The storages that were met: ``live`` bytes now, and in ``peak`` the most since that was last taken."""

    def __init__(self) -> None:
        self.live = self.peak = 0
        self._bytes: dict[int, int] = {}

    def meet(self, tensor: torch.Tensor, *, counts: bool = True) -> None:
        """Count the storage of ``tensor`` from now to its death, if it is new; or never."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._bytes:
            self._bytes[key] = storage.nbytes() if counts else 0
            self.live += self._bytes[key]
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._gone, key).atexit = False

    def counted(self, tensor: torch.Tensor) -> int:
        """Return the bytes of the storage of ``tensor``: nothing where it isn't counted."""
        return self._bytes.get(tensor.untyped_storage()._cdata, 0)

    def take_peak(self) -> int:
        """Return the most bytes since this was last asked."""
        peak, self.peak = self.peak, self.live
        return peak

    def _gone(self, key: int) -> None:
        self.live -= self._bytes.pop(key)


class CountingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what operators make of real tensors in ``storages``; what they are given was there before."""

    def __init__(self, storages: LiveStorages) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for leaf in tensors_in((*args, *kwargs.values())):
            self._storages.meet(leaf, counts=False)
        result = func(*args, **kwargs)
        for leaf in tensors_in(result):
            self._storages.meet(leaf)
        return result


class CountingFakes(Faking):  # type: ignore[no-untyped-call]
    """Fake tensors whose bytes are counted in ``storages``, but for those that operators are given and didn't make.

    What is made of integers alone is real: masks and positions decide by their values what a model computes, and are
    small. What an operator does inside itself isn't counted: torch takes an operator apart only the first time it meets
    it. ``operated`` is called after each operator.
    """

    def __init__(
        self, storages: LiveStorages, operated: Callable[[], None] = lambda: None, *, decides: bool = False
    ) -> None:
        super().__init__(decides=decides)
        self.storages, self._operated = storages, operated
        self._depth = 0

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Have operators make what isn't counted."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self.unwatched():
            result = self._operate(func, types, args, kwargs or {})
            stood_for = [] if self._decides else [*map(self.from_tensor, real_in((*args, *(kwargs or {}).values())))]
        if not self._depth:
            for leaf in (*tensors_in((*args, *(kwargs or {}).values())), *stood_for):
                self.storages.meet(leaf, counts=False)
            for leaf in tensors_in(result):
                self.storages.meet(leaf)
            self._operated()
        return result

    def _operate(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Return what ``func`` makes: of integers the integers, else fake tensors."""
        if self._depth > 1 or self._decides or not is_of_integers((args, kwargs)):
            return super().__torch_dispatch__(func, types, args, kwargs)
        if any(True for _ in tensors_in((*args, *kwargs.values()))):
            return func(*args, **kwargs)
        faked = super().__torch_dispatch__(func, types, args, kwargs)
        is_real = isinstance(faked, torch.Tensor) and not faked.is_floating_point() and faked.device.type == "cpu"
        return func(*args, **kwargs) if is_real else faked


def real_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in ``value`` that aren't fake."""
    return (tensor for tensor in tensors_in(value) if not isinstance(tensor, FakeTensor))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operator is given, or returns: as they are, or in lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from tensors_in(inner)
