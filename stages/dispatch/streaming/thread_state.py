"""What torch keeps for each thread, that calls which take turns in one thread would share.

Autocast and inference mode, the current accelerator, and which of torch's functions and operators are overridden, and
by what. While a mode (``TorchFunctionMode``) or a subclass of tensors answers a function, torch has it off, so that
what it calls isn't answered by it again. A call that gives its turn away in the midst of any of these would leave it so
for the others. So it is with the generators of random numbers, which all threads share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _python_dispatch as operators

from offstage.stages.machine.devices import current_device, set_current_device

_C: Any = torch._C
_ACCELERATOR = torch.accelerator.current_accelerator()
_DEVICES = ("cpu", *([] if _ACCELERATOR is None else [_ACCELERATOR.type]))


class ThreadState(NamedTuple):
    """The state of a thread: modes innermost last, and whether ``autocast`` is on, and its dtype, for each device.

    ``device`` is the index of the current accelerator, null where none is in use.
    """

    overridden: Any
    function_modes: tuple[Any, ...]
    operator_modes: tuple[Any, ...]
    autocast: tuple[tuple[bool, torch.dtype], ...]
    keeps_casts: bool
    inference: bool
    device: int | None

    @classmethod
    def current(cls) -> ThreadState:
        """Return the state of this thread."""
        return cls(
            _C._get_torch_function_state(),
            tuple(_get_current_function_mode_stack()),  # type: ignore[no-untyped-call]
            tuple(operators._get_current_dispatch_mode_stack()),
            tuple((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES),
            torch.is_autocast_cache_enabled(),
            torch.is_inference_mode_enabled(),
            current_device(),
        )

    def in_place(self) -> AbstractContextManager[None]:
        """Have this thread be in this state inside; then in the one that it was in. Gradients are off meanwhile."""
        mine = ThreadState.current()
        return nullcontext() if mine == self else self._instead_of(mine)

    @contextmanager
    def _instead_of(self, mine: ThreadState) -> Iterator[None]:
        inference = nullcontext() if mine.inference is self.inference else torch.inference_mode(self.inference)
        with inference, torch.no_grad():
            self._set()
            try:
                yield
            finally:
                mine._set()

    def restore(self) -> None:
        """Have this thread be in this state again, after what has ended without doing so itself."""
        torch.set_grad_enabled(False)
        if ThreadState.current() != self:
            self._set()

    def _set(self) -> None:
        """Have all be so but inference mode, which torch gives back to who had it alone."""
        _C._set_torch_function_state(_C._TorchFunctionState.ENABLED)
        now = ThreadState.current()
        _exchange(now.function_modes, self.function_modes, _pop_mode, _push_mode)
        _exchange(now.operator_modes, self.operator_modes, operators._pop_mode, operators._push_mode)
        _C._set_torch_function_state(self.overridden)
        if self.device not in (None, now.device):
            set_current_device(self.device)
        if (now.autocast, now.keeps_casts) != (self.autocast, self.keeps_casts):
            torch.clear_autocast_cache()  # what was cast is known by its weight alone, whatever dtype it is in
            torch.set_autocast_cache_enabled(self.keeps_casts)
            for device, (is_on, dtype) in zip(_DEVICES, self.autocast, strict=True):
                torch.set_autocast_enabled(device, is_on)
                torch.set_autocast_dtype(device, dtype)


class RandomState(NamedTuple):
    """The state of what draws at random: of the host's generator, and of each accelerator's that is in use."""

    host: torch.Tensor
    accelerators: tuple[torch.Tensor, ...]

    @classmethod
    def current(cls) -> RandomState:
        """Return the state as it is now."""
        count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
        return cls(torch.get_rng_state(), tuple(torch.cuda.get_rng_state(index) for index in range(count)))

    def restore(self) -> None:
        """Have all go on from this state."""
        torch.set_rng_state(self.host)
        for index, state in enumerate(self.accelerators):
            torch.cuda.set_rng_state(state, index)


def _exchange(old: Sequence[Any], new: Sequence[Any], pop: Callable[..., Any], push: Callable[..., Any]) -> None:
    if [*old] != [*new]:
        for _ in old:
            pop()
        for mode in new:
            push(mode)
