"""Where a pass of the model begins and ends, however it ends.

torch runs a module's hooks after an exception, but not after an interrupt (``KeyboardInterrupt`` is none): what was
acquired then stays so. The next pass finds that the one before it never ended.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from torch import nn

from stages.dispatch.streaming.uncompiled import uncompiled


def mark_passes(
    model: nn.Module,
    *,
    begin: Callable[[], None],
    end: Callable[[], None],
    recover: Callable[[], None],
    is_left: Callable[[], bool],
) -> Iterator[Callable[[], None]]:
    """Hook ``model``: ``begin`` is called before each pass, ``end`` after one that ended well; yield what unhooks it.

    ``recover`` is called before the first pass after one that was interrupted, and before one where ``is_left`` says
    that a call outside of all passes was.
    """
    under_way = False

    def before(_module: nn.Module, _args: Any) -> None:
        nonlocal under_way
        if (under_way or is_left()) and not _is_nested(model):
            recover()
        under_way = True
        begin()

    def after(_module: nn.Module, _args: Any, _output: Any) -> None:
        end()

    def whatever_happened(_module: nn.Module, _args: Any, _output: Any) -> None:
        nonlocal under_way
        under_way = False

    yield model.register_forward_pre_hook(uncompiled(before), prepend=True).remove
    yield model.register_forward_hook(uncompiled(after)).remove
    yield model.register_forward_hook(uncompiled(whatever_happened), always_call=True).remove


def _is_nested(model: nn.Module) -> bool:
    """Return whether a call of ``model`` is under way around the one that asks."""
    calls, frame = 0, sys._getframe()
    above: FrameType | None = frame
    while above is not None:
        calls += above.f_code.co_name == "_call_impl" and above.f_locals.get("self") is model
        above = above.f_back
    return calls > 1
