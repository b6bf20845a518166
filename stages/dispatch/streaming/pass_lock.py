"""Whose turn it is, where several threads call one model: the passes of one end before those of the next begin.

What is streamed is one state: which parts are there, who uses them, what comes next. It has one owner at a time, a
thread from where its call of the model (or of a part of it) begins to where that ends. Threads that wait go on in the
order in which they came, so that two that generate take turns from token to token.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from torch import nn

_LOOK_AGAIN_SECONDS = 0.05
"""How often who waits looks whether the owner still is in a call: an interrupt ends one without a word."""


class PassLock:
    """The right to use what streams for ``model``: of one thread at a time, which may take it again.

    An owner whose call was ended by an interrupt, after which torch calls no hooks, owns nothing: it is found by the
    calls that are on a thread's stack.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = {id(module) for module in model.modules()}
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

    def leave(self) -> None:
        """Let the next thread have it, if it is the calling thread's."""
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
        """Return whether a call of one of the model's modules is on the stack of ``thread``."""
        frame = sys._current_frames().get(thread)
        return any(id(called) in self._modules for called in calls_on(frame, compiled=True))


def calls_on(frame: FrameType | None, *, compiled: bool = False) -> Iterator[object]:
    """Yield the modules whose calls are under way around ``frame``, the innermost first.

    With ``compiled`` those count that torch compiled, in pieces that are named after the whole: one may come twice.
    """
    while frame is not None:
        name = frame.f_code.co_name
        if name == "_call_impl" or (compiled and "_call_impl" in name):
            yield frame.f_locals.get("self")
        frame = frame.f_back
