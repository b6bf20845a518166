"""Bounds on what is made from a checkpoint's small files by code that isn't ours.

A config of a few bytes can ask for buffers of a terabyte, or for a loop that never ends. Where the numbers themselves
don't show it, the work is held to an amount of processor time and of memory that no real model comes near.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from offstage.pipeline.errors import CheckpointError, OffstageError, apart

SECONDS = 60
"""Of processor time, imports included: a model of a trillion parameters takes some seconds."""
BYTES = 2 * 2**30
"""Beside what the process has: what a constructor computes is masks and tables of some MB."""
_AGAIN_SECONDS = 1
"""The end comes again and again: a callback may swallow the first."""
_THREAD_BYTES = 16 * 2**20
"""What a thread of a library's pool may come with: its stack and its share of the heap."""


class _OutOfTimeError(BaseException):
    """Ends the work wherever it is; no ``except Exception`` on the way holds it up."""


@contextmanager
def bounded(what: str) -> Iterator[None]:
    """Hold the block to ``SECONDS`` and ``BYTES``; beyond, a ``CheckpointError`` says so of ``what``.

    Time is bounded in the main thread alone, and neither where the system has no such limits.
    """
    as_none_does = "as no model does; restore the file"
    with bounded_in_time(f"{what}: building it", SECONDS, as_none_does=as_none_does), _memory_bounded(what):
        yield


@contextmanager
def bounded_in_time(
    what: str, seconds: float, *, as_none_does: str, kind: type[OffstageError] = CheckpointError
) -> Iterator[None]:
    """Hold the block to ``seconds`` of processor time; beyond, a ``kind`` says that ``what`` takes more.

    It may stand within another such block, and is then bounded by what ends first.
    """
    try:
        with _time_bound(seconds) as own:
            yield
    except _OutOfTimeError as error:
        if not own:
            raise
        raise kind(f"{what} takes more than {seconds:g} s of processor time, {as_none_does}") from apart(error)


@contextmanager
def _memory_bounded(what: str) -> Iterator[None]:
    try:
        with _memory_bound():
            yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
            raise
        raise CheckpointError(
            f"{what}: building it takes more than {BYTES} bytes beside the weights, as no model does; restore the file"
        ) from apart(error)


@contextmanager
def _time_bound(seconds: float) -> Iterator[bool]:
    """Have the block ended after ``seconds``; it is given whether it is, and not by a block around it."""
    left = signal.getitimer(signal.ITIMER_PROF)[0]
    around = signal.getsignal(signal.SIGPROF) is _give_up
    taken = left > 0 and (not around or left <= seconds)  # a profiler's, or an earlier end's
    if taken or threading.current_thread() is not threading.main_thread():
        yield False
        return
    before, began = signal.signal(signal.SIGPROF, _give_up), time.process_time()
    signal.setitimer(signal.ITIMER_PROF, seconds, _AGAIN_SECONDS)
    try:
        yield True
    finally:
        left = max(left - (time.process_time() - began), _AGAIN_SECONDS) if left else 0
        signal.setitimer(signal.ITIMER_PROF, left, _AGAIN_SECONDS if left else 0)
        signal.signal(signal.SIGPROF, before)


def _give_up(_number: int, _frame: FrameType | None) -> None:
    raise _OutOfTimeError


@contextmanager
def _memory_bound() -> Iterator[None]:
    in_use = _data_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if in_use is None or soft != resource.RLIM_INFINITY:
        yield
        return
    most = in_use + BYTES + (os.cpu_count() or 1) * _THREAD_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _data_bytes(status: Path = Path("/proc/self/status")) -> int | None:
    """Return what the process has of the memory that ``RLIMIT_DATA`` counts; null where the system doesn't tell."""
    match = re.search(r"^VmData:\s*(\d+) kB$", status.read_text(), re.MULTILINE) if status.is_file() else None
    return int(match[1]) * 1024 if match else None
