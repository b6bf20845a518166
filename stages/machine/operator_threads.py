"""Torch's operators in the thread that calls them, and the teams that share them: beside threads of one's own.

With OpenMP each thread has its own say of how many its operators are shared among, and torch asks it at each operator.
``torch.set_num_threads`` would speak for all threads that are yet to come.

Between two operators that are shared, the threads of a team wait for the next one in a loop, for milliseconds (GNU's
runtime): at no cost where nobody else wants the cores, and at the cost of a core where others do.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from offstage.pipeline.environment import allowed_cores
from offstage.pipeline.process_setup import WAIT_POLICIES

_SHARED_FROM = 2**15
"""Operators on fewer elements are never shared: torch's ``GRAIN_SIZE``."""

_set_threads = getattr(ctypes.PyDLL(None), "omp_set_num_threads", None)


def elements_alone(wanted: int) -> int:
    """Return ``wanted``, or fewer elements if that is what an operator can take without sharing, inside ``alone``."""
    return wanted if _set_threads is not None else min(wanted, _SHARED_FROM - 2)


@contextmanager
def alone() -> Iterator[None]:
    """Have this thread's operators start no others."""
    before = torch.get_num_threads()  # asked for before it is set, since a thread's first operator sets it too
    if _set_threads is not None:
        _set_threads(1)
    try:
        yield
    finally:
        if _set_threads is not None:
            _set_threads(before)


@cache
def let_idle_teams_sleep() -> None:
    """Have the threads of teams sleep as soon as they have nothing to do, from now on; unless the environment says.

    GNU's runtime has them wait in a loop for long only while all its teams together have no more threads than there are
    cores. No call tells it otherwise once it is loaded; so a thread that sleeps, to the end, has a team too.
    """
    mates = torch.get_num_threads()
    if _set_threads is None or mates < 2 or any(name in os.environ for name in WAIT_POLICIES):
        return
    started = threading.Event()
    size = max(2, len(allowed_cores()) - mates + 2)
    threading.Thread(target=_own_team, args=(size, started), name="offstage-idle", daemon=True).start()
    started.wait()


def _own_team(size: int, started: threading.Event) -> None:
    """Be the first of a team of ``size`` threads, and sleep."""
    assert _set_threads is not None
    torch.get_num_threads()  # before it is set, since a thread's first operator sets it too
    _set_threads(size)
    torch.zeros(size * _SHARED_FROM, dtype=torch.uint8, device="cpu").add_(1)
    started.set()
    threading.Event().wait()
