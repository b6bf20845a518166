"""The threads that read: what is waited for goes first, then what is certain to be used.

Jobs of each kind begin in the order in which they were asked for, a certain one only where no awaited one waits.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, TypeVar

from offstage.stages.machine.operator_threads import let_idle_teams_sleep
from offstage.stages.machine.probes import READING_THREADS

_Result = TypeVar("_Result")


class Urgency(Enum):
    """How soon a job is done: those that are awaited first, then what is certain to be used."""

    AWAITED = 0
    CERTAIN = 1


@dataclass(frozen=True, slots=True, eq=False)
class _Reading:
    """Something to do, and what comes of it."""

    work: Callable[[], Any]
    future: Future[Any]


class ReadingThreads:
    """``count`` threads, which start as they are needed and end with the process.

    One that has something to do goes on until there is nothing more: asking for a job wakes a thread only where there
    is one that rests, and costs the thread that computes little.
    """

    def __init__(self, count: int) -> None:
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="offstage-read")
        self._count, self._working = count, 0
        self._jobs = {urgency: deque[_Reading]() for urgency in Urgency}
        self._choosing = threading.Lock()

    def submit(self, work: Callable[..., _Result], *given: Any, urgency: Urgency = Urgency.CERTAIN) -> Future[_Result]:
        """Have ``work`` be done with what is ``given``."""
        future: Future[_Result] = Future()
        with self._choosing:
            self._jobs[urgency].append(_Reading(partial(work, *given), future))
            rests = self._working < self._count
            self._working += rests
        if rests:
            self._threads.submit(self._work)
        return future

    def _work(self) -> None:
        """Do one job after the other, those that were cancelled left out, until there is none.

        Once whoever waits for one hears, nothing here holds what it was given, nor does a traceback of its failure.
        """
        while (job := self._next()) is not None:
            work, future = job.work, job.future
            del job
            if future.set_running_or_notify_cancel():
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

    def _next(self) -> _Reading | None:
        """Return what is done now; null where there is nothing, and the thread rests."""
        with self._choosing:
            jobs = next(filter(None, self._jobs.values()), None)
            self._working -= jobs is None
            return jobs.popleft() if jobs is not None else None


@functools.cache
def reader_pool() -> ReadingThreads:
    """Return the process's pool of reading threads; it is started by the first read and ends with the process.

    On the host they read, and unpack, on the cores that compute.
    """
    let_idle_teams_sleep()
    return ReadingThreads(READING_THREADS)


os.register_at_fork(after_in_child=reader_pool.cache_clear)  # its threads aren't there
