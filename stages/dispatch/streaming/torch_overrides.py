"""Which of torch's functions are overridden, and by what: state of a thread, that calls which take turns in it share.

While a mode (``TorchFunctionMode``) or a subclass of tensors answers a function, torch has it off, so that what it
calls isn't answered by it again. A call that gives its turn away then would leave it off for the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode

Modes = Sequence[Any]
_C: Any = torch._C


def modes() -> Modes:
    """Return the modes that are on in this thread, the innermost last."""
    return [*_get_current_function_mode_stack()]  # type: ignore[no-untyped-call]


@contextmanager
def overridden_by(wanted: Modes) -> Iterator[None]:
    """Have all functions be overridden inside, by subclasses and the modes ``wanted``; then as they were."""
    state, mine = _C._get_torch_function_state(), modes()
    _C._set_torch_function_state(_C._TorchFunctionState.ENABLED)
    _exchange(mine, wanted)
    try:
        yield
    finally:
        _exchange(modes(), mine)
        _C._set_torch_function_state(state)


def _exchange(old: Modes, new: Modes) -> None:
    if [*old] != [*new]:
        for _ in old:
            _pop_mode()  # type: ignore[no-untyped-call]
        for mode in new:
            _push_mode(mode)  # type: ignore[no-untyped-call]
