"""Asking which parts of a file the page cache holds, without reading any.

A read that doesn't wait (``RWF_NOWAIT``) would tell too, but on today's kernels it starts a read-ahead, which then
competes with the direct read that follows.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES = mmap.PAGESIZE


def cached_pages(descriptor: int, size: int) -> NDArray[np.bool_]:
    """Return, for each page of the open file of ``size`` bytes, whether the page cache holds it.

    Where that can't be told (another system, or a file of somebody else's, for which Linux would always say yes), no
    page counts as held.
    """
    pages = np.zeros(-(-size // PAGE_BYTES), dtype=np.uint8)
    mincore = getattr(_libc(), "mincore", None)
    if mincore is None or not size or not _may_ask(descriptor):
        return pages.astype(np.bool_)
    try:
        with mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as mapped:
            address = np.frombuffer(mapped, dtype=np.uint8).ctypes.data
            if mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data)):
                pages[:] = 0
    except OSError:
        pages[:] = 0
    return (pages & 1).astype(np.bool_)


def _libc() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):
        return None


def _may_ask(descriptor: int) -> bool:
    return os.geteuid() in (0, os.fstat(descriptor).st_uid)
