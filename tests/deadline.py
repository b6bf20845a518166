"""A limit of time for tests of what once hung."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deadline(seconds: int) -> Iterator[None]:
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
