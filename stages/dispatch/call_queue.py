"""Calls of many threads on one loaded model, as a server's: they wait for each other, or share its passes.

One thread makes them all, in lockstep, at most so many at a time: with one it is a queue. Calls begin in the order in
which they came, join where a pass begins, and each has the bits that it has alone. A call is a future: whoever asked
waits for it, awaits it, or cancels it, which ends it where its next pass would begin and frees its place. Where hosts
make it together it then ends on all of them, whichever cancelled it. The thread ends when there has been nothing to do
for a while.

Random numbers are each call's own, from a seed that is drawn for it: lockstep gives all that join the same, and two
clients who sample one prompt are to have two answers.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import torch

from offstage.pipeline.errors import BusyError
from offstage.stages.dispatch.streaming.lanes import Task
from offstage.stages.dispatch.streaming.lockstep import UNWANTED
from offstage.stages.dispatch.streaming.module_state import LockstepError
from offstage.stages.dispatch.streaming.passes import ModelPasses

_IDLE_SECONDS = 5.0


class SubmittedCall(Future[Any]):
    """A call that was handed over: a future that can also be cancelled while it is under way."""

    def __init__(self, function: Callable[[], Any], seed: int, failed: Callable[[Exception], None]) -> None:
        super().__init__()
        self._function, self._seed, self._failed = function, seed, failed
        self._end: Exception | None = None

    def cancel(self) -> bool:
        """End the call before it begins, or where its next pass of the model would; return whether it can be ended."""
        self.end(CancelledError())
        return super().cancel() or not self.done()

    def end(self, error: Exception) -> None:
        """Have the call be ended by ``error`` where its next pass would begin, if nothing ends it before."""
        self._end = self._end or error

    def make(self) -> None:
        """Be the call, and keep what comes of it; what ends all calls together is left to whoever sees that."""
        if not self.set_running_or_notify_cancel():
            self._failed(CancelledError())
            return
        UNWANTED.set(lambda: self._end)
        torch.manual_seed(self._seed)
        try:
            answer = self._function()
        except Exception as error:  # noqa: BLE001 - whoever asked is told
            self._failed(error)
            self.set_exception(error)
        else:
            self.set_result(answer)


class CallQueue(Iterator[Task | None]):
    """The calls that wait for the model of ``passes``: at most ``size`` are under way, and ``most_waiting`` wait.

    As an iterator it gives lockstep what joins next. All of its state is guarded by ``_changed``.
    """

    def __init__(self, passes: ModelPasses, *, size: int, most_waiting: int) -> None:
        self._passes, self._size, self._most_waiting = passes, size, most_waiting
        self._refusal: str | None = None
        self._start_anew()

    def _start_anew(self) -> None:
        """Begin with no calls: a process that was forked has neither those of its parent nor the thread."""
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        self._has_begun = False  # those that go together now
        self._changed = threading.Condition()
        self._waiting: deque[SubmittedCall] = deque()
        self._under_way: list[SubmittedCall] = []
        self._seeds = torch.Generator().manual_seed(torch.initial_seed())

    def submit(self, function: Callable[[], Any]) -> SubmittedCall:
        """Have ``function`` be called when its turn comes; a ``BusyError`` where as many wait as may."""
        if self._process != os.getpid():
            self._start_anew()
        if threading.current_thread() is self._thread:
            raise RuntimeError("a call that is under way can't hand over another, for which it would wait: make it")
        with self._changed:
            if self._refusal is not None:
                raise RuntimeError(self._refusal)
            if len(self._waiting) >= self._most_waiting:
                raise BusyError(
                    f"max_waiting: {self._most_waiting} calls of this model wait already; come again later, or load it "
                    "with a larger max_waiting"
                )
            seed = int(torch.randint(2**63 - 1, (), generator=self._seeds))
            call = SubmittedCall(function, seed, self._passes.fail_call)
            self._waiting.append(call)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="offstage-calls", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return call

    def close(self, refusal: str) -> None:
        """Refuse calls from here on, those too that wait, and end what is under way where its next pass would begin."""
        with self._changed:
            self._refusal = refusal
            waiting, self._waiting = self._waiting, deque()
            for call in self._under_way:
                call.end(RuntimeError(refusal))
            self._changed.notify_all()
        for call in waiting:
            _fail(call, RuntimeError(refusal))

    def __next__(self) -> Task | None:
        """Return the call that joins those under way, null where none waits.

        Where another thread waits to call the model it has its turn before any joins.
        """
        with self._changed:
            self._under_way = [call for call in self._under_way if not call.done()]
            if not self._waiting or (self._has_begun and self._passes.lock.is_awaited):
                return None
            self._has_begun = True
            call = self._waiting.popleft()
            self._under_way.append(call)
            return call.make

    def _work(self) -> None:
        """Make calls until there has been none for a while."""
        while self._has_calls():
            self._has_begun = False
            try:
                self._passes.go_together(self, size=self._size, is_queue=True)
            except Exception as error:  # noqa: BLE001 - those under way are told
                if isinstance(error, LockstepError):
                    self._size = 1
                with self._changed:
                    ended, self._under_way = self._under_way, []
                for call in ended:
                    _fail(call, error)

    def _has_calls(self) -> bool:
        """Return whether a call waits, once there is one; false where none came, and the thread is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._refusal is not None, _IDLE_SECONDS)
            if not self._waiting:
                self._thread = None
            return bool(self._waiting)


def _fail(call: SubmittedCall, error: Exception) -> None:
    """Have ``call`` end by ``error`` if it hasn't ended."""
    if not call.done() and (call.running() or call.set_running_or_notify_cancel()):
        call.set_exception(error)
