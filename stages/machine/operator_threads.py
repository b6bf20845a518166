"""Torch's operators in the thread that calls them: for threads that work side by side, and must not start teams.

With OpenMP each thread has its own say of how many its operators are shared among, and torch asks it at each operator.
``torch.set_num_threads`` would speak for all threads that are yet to come.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

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
