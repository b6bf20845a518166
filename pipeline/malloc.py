"""The host's allocator: what is freed goes back to the system, at once or when asked.

By default the C library keeps freed blocks of up to 32 MB for later, in heaps that it can't shrink from the middle.
A long prompt's activations are of that size, and what is kept of them stood for a fifth of a process's peak: memory
that nobody uses, that no plan can predict, and that a memory cap kills for. Blocks of a MiB or more are mapped instead.
A token's own activations are smaller, so decoding doesn't pay for it. It must be said before much was allocated: what
a heap has already grown to is filled again before anything is mapped.
"""

from __future__ import annotations

import ctypes
import sys

MAPPED_BYTES = 2**20
"""Blocks from this size on are mapped one by one, and unmapped when they are freed."""
KEPT_BYTES = 16 * 2**20
"""How much may be free at the end of the heap before it shrinks."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def return_heap() -> None:
    """Have the C library give back what is free in its heaps now, in the middle of them too (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None
    if trim is not None:
        trim(0)


def return_freed_memory() -> bool:
    """Have the C library give large freed blocks back at once; return whether it can (glibc)."""
    if not sys.platform.startswith("linux"):
        return False
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    options = ((_M_MMAP_THRESHOLD, MAPPED_BYTES), (_M_TRIM_THRESHOLD, KEPT_BYTES))
    return all(bool(set_option(option, size)) for option, size in options)
