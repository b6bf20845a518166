"""The threads that read: what is waited for goes first, then what is certain to be used.

Jobs of each kind begin in the order in which they were asked for, a certain one only where no awaited one waits.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from enum import Enum
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from offstage.stages.machine.probes import READING_THREADS

_Result = TypeVar("_Result")


class Urgency(Enum):
    """How soon a job is done: those that are awaited first, then what is certain to be used."""

    AWAITED = 0
    CERTAIN = 1


_Reading = tuple[Callable[[], Any], Future[Any]]
"""Something to do, and what comes of it."""


class ReadingThreads:
    """``count`` threads, the same ones until it is closed.

    One that has something to do goes on until there is nothing more: asking for a job wakes a thread only where there
    is one that rests, and costs the thread that computes little. The last that went to rest wakes first: what a thread
    keeps to read with is there for few jobs at a time.

    An interrupt may come to whoever asks at any moment, as in an executor's ``submit``; one that came while that
    started a thread would leave it unknown, and the interpreter would wait for it for ever. So all threads are started
    before anything is asked for, and none keeps a process from ending but for the job that it does.
    """

    def __init__(self, count: int) -> None:
        self._jobs = {urgency: deque[_Reading]() for urgency in Urgency}
        self._resting: list[SimpleQueue[None]] = []
        self._choosing, self._closed = threading.Lock(), False
        self._threads = [
            threading.Thread(target=self._work, name=f"offstage-read_{number}", daemon=True) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[..., _Result], *given: Any, urgency: Urgency = Urgency.CERTAIN) -> Future[_Result]:
        """Have ``work`` be done with what is ``given``. Raises a ``RuntimeError`` once threads have ended."""
        future: Future[_Result] = Future()
        with self._choosing:
            if self._closed:
                raise RuntimeError("nothing is read any more: the process ends")
            self._jobs[urgency].append((partial(work, *given), future))
            if self._resting:
                self._resting[-1].put(None)
                self._resting.pop()
        return future

    def close(self) -> None:
        """End the threads, once each has done the job that it is at."""
        with self._choosing:
            self._closed = True
            for resting in self._resting:
                resting.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        """Do one job after the other, those that were cancelled left out.

        Once whoever waits for one hears, nothing here holds what it was given, nor does a traceback of its failure.
        """
        wake: SimpleQueue[None] = SimpleQueue()
        while (job := self._next(wake)) is not None:
            work, future = job
            del job
            if not future.set_running_or_notify_cancel():
                del work, future
                continue
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - it is for whoever waits
                del work
                future.set_exception(error)
            else:
                del work
                future.set_result(result)
                del result
            del future

    def _next(self, wake: SimpleQueue[None]) -> _Reading | None:
        """Return what is done now, and rest until there is something; null once there are to be no threads."""
        while True:
            with self._choosing:
                if self._closed:
                    return None
                if jobs := next(filter(None, self._jobs.values()), None):
                    return jobs.popleft()
                self._resting.append(wake)
            wake.get()


@functools.cache
def reader_pool() -> ReadingThreads:
    """Return the process's pool of reading threads; it is started by the first read and ends with the process.

    On the host they read, and unpack, on the cores that compute.
    """
    pool = ReadingThreads(READING_THREADS)
    atexit.register(pool.close)
    return pool


def _leave_to_parent() -> None:
    """Have a fork start threads of its own: those of its parent aren't there."""
    if reader_pool.cache_info().currsize:
        atexit.unregister(reader_pool().close)
        reader_pool.cache_clear()


os.register_at_fork(after_in_child=_leave_to_parent)
