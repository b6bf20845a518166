"""Whose turn it is, where several threads call one model: the passes of one end before those of the next begin.

What is streamed is one state: which parts are there, who uses them, what comes next. It has one owner at a time, a
thread from where its call of the model (or of a part of it) begins to where that ends. Threads that wait go on in the
order in which they came, so that two that generate take turns from token to token. Where a model's modules keep what
they have read in attributes of theirs (RecurrentGemma's states), all that a thread generates is one turn.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn

_LOOK_AGAIN_SECONDS = 0.05
"""How often who waits looks whether the owner still is in a call: an interrupt ends one without a word."""


class PassLock:
    """The right to use what streams for ``model``: of one thread at a time, which may take it again.

    An owner whose call was ended by an interrupt, after which torch calls no hooks, owns nothing: it is found by the
    calls that are on a thread's stack.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._modules = model, {id(module) for module in model.modules()}
        self._places = _places_for_state(model)
        self._has_state = False  # in its modules, as far as is known
        self._owner: int | None = None
        self._is_held = False  # between the owner's calls, too
        self.start_anew()

    def start_anew(self) -> None:
        """Go on in a process that was forked: other threads neither own nor wait, and hold no lock."""
        me = threading.get_ident()
        self._changed = threading.Condition(threading.Lock())
        self._waiting: deque[object] = deque()
        if self._owner != me:
            self._owner, self._is_held = None, False

    def enter(self) -> None:
        """Return when what streams is the calling thread's."""
        if self.is_mine():  # nobody else can change that
            return
        with self._changed:
            self._wait()
            self._owner = threading.get_ident()

    def is_mine(self) -> bool:
        """Return whether what streams is the calling thread's."""
        return self._owner == threading.get_ident()

    @property
    def is_awaited(self) -> bool:
        """Whether another thread waits for its turn."""
        return bool(self._waiting)

    def leave(self, *, pass_is_over: bool = False) -> None:
        """Let the next thread have it, if it is the calling thread's; as its ``pass_is_over``, unless it generates with
        a model that has state.
        """
        if pass_is_over and self._keeps_state() and _generates(self._model, sys._getframe()):
            return
        with self._changed:
            if self.is_mine() and not self._is_held:
                self._owner = None
                self._changed.notify_all()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Have what streams be the calling thread's, whose it may be already."""
        outermost = not self.is_mine()
        self.enter()
        self._is_held = self._is_held or outermost
        try:
            yield
        finally:
            if outermost:
                self._is_held = False
                self.leave()

    def _wait(self) -> None:
        """Wait until nobody owns it and nobody who came before waits; ``_changed`` is held."""
        if not self._waiting and self._is_free():
            return
        ticket = object()
        self._waiting.append(ticket)
        try:
            while self._waiting[0] is not ticket or not self._is_free():
                self._changed.wait(_LOOK_AGAIN_SECONDS)
        finally:
            self._waiting.remove(ticket)
            self._changed.notify_all()

    def _is_free(self) -> bool:
        return self._owner is None or not (self._is_held or self._is_calling(self._owner))

    def _is_calling(self, thread: int) -> bool:
        """Return whether a call of one of the model's modules is on the stack of ``thread``, or one that generates with
        a model that has state.
        """
        frame = sys._current_frames().get(thread)
        if self._has_state and _generates(self._model, frame):
            return True
        return any(id(called) in self._modules for called in calls_on(frame, compiled=True))

    def _keeps_state(self) -> bool:
        """Return whether passes leave tensors in attributes of the model's modules."""
        if not self._has_state:
            values = ((table.get(name), first) for table, name, first in self._places)
            self._has_state = any(value is not first and isinstance(value, torch.Tensor) for value, first in values)
        return self._has_state


def _places_for_state(model: nn.Module) -> list[tuple[dict[str, Any], str, torch.Tensor | None]]:
    """Return where modules of ``model`` have, or may come to have, tensors that are neither parameters nor buffers: the
    attributes of each, their names and values.
    """
    tables = map(vars, model.modules())
    return [(table, name, value) for table in tables for name, value in table.items()
            if value is None or isinstance(value, torch.Tensor)]  # fmt: skip


def _generates(model: nn.Module, frame: FrameType | None) -> bool:
    """Return whether ``generate`` of ``model`` is under way around ``frame``."""
    while frame is not None:
        if frame.f_code.co_name == "generate" and frame.f_locals.get("self") is model:
            return True
        frame = frame.f_back
    return False


def calls_on(frame: FrameType | None, *, compiled: bool = False) -> Iterator[object]:
    """Yield the modules whose calls are under way around ``frame``, the innermost first.

    With ``compiled`` those count that torch compiled, in pieces that are named after the whole: one may come twice.
    """
    while frame is not None:
        name = frame.f_code.co_name
        if name == "_call_impl" or (compiled and "_call_impl" in name):
            yield frame.f_locals.get("self")
        frame = frame.f_back
