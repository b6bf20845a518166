"""The kernels that libraries make for a shape: a few of them are kept, and none are made that a token needs once.

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
from collections.abc import MutableMapping

CAPACITY = 24
"""How many are kept in each cache: more than the shapes of one pass of decoding, which repeat with every layer."""

_CACHES = (("LRU_CACHE_CAPACITY",), ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"))
"""The names of the variable of each: torch's, which holds on to what oneDNN's lets go, and oneDNN's."""

WITHOUT_CUDNN_ATTENTION = "TORCH_CUDNN_SDPA_DEPRIORITIZED"
"""The variable that has torch take its other kernels of attention first; of torch 2.11 and later."""


def bound_kernel_caches(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have few compiled kernels be kept, and attention need none of its length, unless the ``environment`` says else.

    It must be said before the first product in half precision and the first attention: torch looks once.
    """
    environment.setdefault(WITHOUT_CUDNN_ATTENTION, "1")
    for names in _CACHES:
        if not any(name in environment for name in names):
            environment[names[0]] = str(CAPACITY)
