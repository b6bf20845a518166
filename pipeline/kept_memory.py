"""What libraries keep for later of memory: little, so that what a run holds is what its plan predicts.

By default the C library keeps freed blocks of up to 32 MB for later, in heaps that it can't shrink from the middle.
A long prompt's activations are of that size, and what is kept of them stood for a fifth of a process's peak: memory
that nobody uses, that no plan can predict, and that a memory cap kills for. Blocks of a MiB or more are mapped instead.
It must be said before much was allocated: what a heap has already grown to is filled again before anything is mapped.

A token's own activations are smaller, but with each a layer's keys and values are made anew, one token longer, and the
old ones freed: at a thousand tokens most of a token's time went into pages of memory that had just been given back.
While tokens are decoded one after the other, what is freed so is taken again; that it is little longer each time leaves
no more than a layer's keys and values unused. It is all given back as the next prompt begins. So it is with a prompt's
own activations, which take half of its time, where they are so little of all that what is unused of them is, too.

A product in half precision is computed by code that is made for the very shape of its operands, of 0.4 to 0.7 MB, and
kept in two caches, oneDNN's and torch's own, each of 1024. Where shapes repeat that is little. But a prompt of another
length is another shape for every matrix, and so is each token where attention is computed by plain products (gpt-oss),
and each number of tokens that an expert gets: a process grew by 1.3 MB a token, which no plan can predict. A shape
that comes back after many others is compiled again, in about half a millisecond; the bits are those of the same code.

On Hopper and Blackwell torch prefers cuDNN's attention, which plans anew for each length of the cache: on an H100 more
than half of a token's time, with a billion parameters. What torch prefers elsewhere is there too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

MAPPED_BYTES = 2**20
"""Blocks from this size on are mapped one by one, and unmapped when they are freed."""
REUSED_BYTES = 32 * 2**20
"""The same while those that are freed are taken again: the most that the C library takes."""
KEPT_BYTES = 16 * 2**20
"""How much may be free at the end of the heap before it shrinks."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

CAPACITY = 24
"""How many are kept in each cache: more than the shapes of one pass of decoding, which repeat with every layer."""

_CACHES = (("LRU_CACHE_CAPACITY",), ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"))
"""The names of the variable of each: torch's, which holds on to what oneDNN's lets go, and oneDNN's."""

WITHOUT_CUDNN_ATTENTION = "TORCH_CUDNN_SDPA_DEPRIORITIZED"
"""The variable that has torch take its other kernels of attention first; of torch 2.11 and later."""


@dataclass(slots=True)
class _Heap:
    """What this process's C library was told: from which size on blocks are ``mapped``; 0 where it wasn't. And whether
    the process ``decodes``.
    """

    mapped: int = 0
    decodes: bool = False


_heap = _Heap()


def keep_little() -> None:
    """Have libraries keep little in this process: what is freed goes back, and few compiled kernels stay."""
    return_freed_memory()
    bound_kernel_caches()


def return_heap() -> None:
    """Have the C library give back what is free in its heaps now, in the middle of them too (glibc)."""
    trim = _of_c_library("malloc_trim")
    if trim is not None:
        trim(0)


def return_freed_memory() -> bool:
    """Have the C library give large freed blocks back at once; return whether it can (glibc)."""
    is_told = _set_options((_M_MMAP_THRESHOLD, MAPPED_BYTES), (_M_TRIM_THRESHOLD, KEPT_BYTES))
    _heap.mapped = MAPPED_BYTES if is_told else 0
    return is_told


def take_again(again: bool, *, decodes: bool) -> None:
    """Have freed blocks be taken ``again`` from now on, or be given back at once. As a process begins or ends that it
    ``decodes``, all that is free is given back.

    Nothing changes where it was never told to give them back, or can't.
    """
    if not _heap.mapped:
        return
    mapped = REUSED_BYTES if again else MAPPED_BYTES
    if mapped != _heap.mapped:
        _heap.mapped = mapped
        _set_options((_M_MMAP_THRESHOLD, mapped))
    if decodes != _heap.decodes:
        _heap.decodes = decodes
        return_heap()


def _set_options(*options: tuple[int, int]) -> bool:
    """Have the C library go by ``options``; return whether it does."""
    set_option = _of_c_library("mallopt")
    return set_option is not None and all(bool(set_option(option, size)) for option, size in options)


def _of_c_library(name: str) -> Any:
    """Return the function of that ``name``; null where the system's C library isn't known to have it."""
    import ctypes  # a plan, which asks for sizes alone, is made without

    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None


def bound_kernel_caches(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have few compiled kernels be kept, and attention need none of its length, unless the ``environment`` says else.

    It must be said before the first product in half precision and the first attention: torch looks once.
    """
    environment.setdefault(WITHOUT_CUDNN_ATTENTION, "1")
    for names in _CACHES:
        if not any(name in environment for name in names):
            environment[names[0]] = str(CAPACITY)
