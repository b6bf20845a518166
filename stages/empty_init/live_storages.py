"""The bytes of tensors, each storage counted once, from its birth to its death.

Operators are watched and not allocators: real tensors and fake ones are counted alike, and nobody's peak is set back.
What an operator takes inside itself and gives back at its end isn't seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
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
        for leaf in tensors_in((args, kwargs)):
            self._storages.meet(leaf, counts=False)
        result = func(*args, **kwargs)
        for leaf in tensors_in(result):
            self._storages.meet(leaf)
        return result


class CountingFakes(Faking):  # type: ignore[no-untyped-call]
    """Fake tensors whose bytes are counted in ``storages``, but for those that operators are given and didn't make.

    What is made of integers alone is real: masks and positions decide by their values what a model computes, and are
    small. ``note`` is called after each operator.
    """

    def __init__(self, storages: LiveStorages, note: Callable[[], None] = lambda: None, *, decides: bool) -> None:
        super().__init__(decides=decides)
        self.storages, self._note = storages, note

    def operated(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count what ``func`` made, and not what it was given, nor what stands for that where it is real."""
        for leaf in tensors_in((args, kwargs)):
            self.storages.meet(leaf, counts=False)
            if not self._decides and not isinstance(leaf, FakeTensor):
                with self.unwatched():
                    self.storages.meet(self.from_tensor(leaf), counts=False)
        for leaf in tensors_in(result):
            self.storages.meet(leaf)
        self._note()

    def operate(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Return what ``func`` makes: of integers the integers, else fake tensors."""
        if self._depth > 1 or self._decides or not is_of_integers((args, kwargs)):
            return super().operate(func, types, args, kwargs)
        if any(True for _ in tensors_in((args, kwargs))):
            return func(*args, **kwargs)
        faked = super().operate(func, types, args, kwargs)
        is_real = isinstance(faked, torch.Tensor) and not faked.is_floating_point() and faked.device.type == "cpu"
        return func(*args, **kwargs) if is_real else faked


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operator is given, or returns: as they are, in lists, or by name."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(inner)
