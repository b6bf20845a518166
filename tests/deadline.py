"""Limits of time for tests: of what once hung, far beyond what it takes, and of the processor for what is quick.

Other tests, and other users, keep a machine busy: what the clock says is no fault of what is tested.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deadline(seconds: int = 120) -> Iterator[None]:
    """Fail the test where the block takes longer; a call that blocks is interrupted."""

    def fail(_number: int, _frame: FrameType | None) -> None:
        raise AssertionError(f"still at work after {seconds} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def seconds_of_children() -> float:
    """Return what the processes that this one has waited for took of the processors."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
