"""The kernels that oneDNN compiles for a shape: a few of them are kept, not a thousand.

A product in half precision is computed by code that is made for the very shape of its operands, of 0.4 to 0.7 MB, and
kept in two caches, oneDNN's and torch's own, each of 1024. Where shapes repeat that is little. But a prompt of another
length is another shape for every matrix, and so is each token where attention is computed by plain products (gpt-oss),
and each number of tokens that an expert gets: a process grew by 1.3 MB a token, which no plan can predict. A shape
that comes back after many others is compiled again, in about half a millisecond; the bits are those of the same code.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

CAPACITY = 24
"""How many are kept in each cache: more than the shapes of one pass of decoding, which repeat with every layer."""

_CACHES = (("LRU_CACHE_CAPACITY",), ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"))
"""The names of the variable of each: torch's, which holds on to what oneDNN's lets go, and oneDNN's."""


def bound_kernel_caches(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have few compiled kernels be kept, unless the ``environment`` says how many.

    It must be said before the first product in half precision: each cache looks once.
    """
    for names in _CACHES:
        if not any(name in environment for name in names):
            environment[names[0]] = str(CAPACITY)
