"""The threads that read: what is waited for goes first, then what is certain to be used, then what is likely to be.

Jobs of each kind begin in the order in which they were asked for, and one only where none waits of those before it.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeVar

from offstage.stages.machine.operator_threads import let_idle_teams_sleep
from offstage.stages.machine.probes import READING_THREADS

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


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
        self._awaited, self._certain, self._likely = deque[_Reading](), deque[_Reading](), deque[_Reading]()
        self._choosing = threading.Lock()

    def submit(
        self, work: Callable[_Given, _Result], /, *args: _Given.args, **kwargs: _Given.kwargs
    ) -> Future[_Result]:
        """Have ``work`` be done with these arguments; what it gives is certain to be used."""
        return self._put(self._certain, partial(work, *args, **kwargs))

    def submit_awaited(
        self, work: Callable[_Given, _Result], /, *args: _Given.args, **kwargs: _Given.kwargs
    ) -> Future[_Result]:
        """Have ``work`` be done with these arguments before all that nobody waits for yet."""
        return self._put(self._awaited, partial(work, *args, **kwargs))

    def submit_likely(
        self, work: Callable[_Given, _Result], /, *args: _Given.args, **kwargs: _Given.kwargs
    ) -> Future[_Result]:
        """Have ``work`` be done with these arguments once nothing certain waits."""
        return self._put(self._likely, partial(work, *args, **kwargs))

    def make_awaited(self, futures: Collection[Future[Any]]) -> None:
        """Have the likely jobs of ``futures`` that haven't begun be awaited ones, after those that there are."""
        chosen = {*futures}
        with self._choosing:
            jobs = [job for job in self._likely if job.future in chosen]
            for job in jobs:
                self._likely.remove(job)
            self._awaited.extend(jobs)

    def _put(self, jobs: deque[_Reading], work: Callable[[], _Result]) -> Future[_Result]:
        future: Future[_Result] = Future()
        with self._choosing:
            jobs.append(_Reading(work, future))
            rests = self._working < self._count
            self._working += rests
        if rests:
            self._threads.submit(self._work)
        return future

    def _work(self) -> None:
        while self._do_next():
            pass

    def _do_next(self) -> bool:
        """Do one job, unless it was cancelled; return false where there is none.

        Once whoever waits for it hears, nothing here holds what it was given, nor does the traceback of one that fails.
        """
        with self._choosing:
            jobs = self._awaited or self._certain or self._likely
            if not jobs:
                self._working -= 1
                return False
            job = jobs.popleft()
        work, future = job.work, job.future
        del job
        if not future.set_running_or_notify_cancel():
            return True
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - it is for whoever waits
            del work
            future.set_exception(error)
            del future
        else:
            del work
            future.set_result(result)
        return True


@functools.cache
def reader_pool() -> ReadingThreads:
    """Return the process's pool of reading threads; it is started by the first read and ends with the process.

    On the host they read, and unpack, on the cores that compute.
    """
    let_idle_teams_sleep()
    return ReadingThreads(READING_THREADS)


os.register_at_fork(after_in_child=reader_pool.cache_clear)  # its threads aren't there
