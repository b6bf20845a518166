"""Float32 values as another dtype, tile by tile, in numpy: reading threads cast with it.

numpy has no bfloat16; its bits are the upper half of a float32's, rounded to nearest, ties to even, as torch does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

TILE_ELEMENTS = 2**17
"""What is unpacked at once: its temporaries stay in a core's caches, and calls cost little beside them."""

DTYPES = ("float32", "bfloat16", "float16")
"""What float32 values can be written as."""

_CARRIERS = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}
_QUIET = 0x7FC0


def elements_of(target: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[Any]:
    """Return the bytes ``target`` as elements of ``dtype``; of bfloat16 as ``uint16``."""
    return target.view(_CARRIERS[dtype])


def cast_values(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    """Return ``values`` as elements of ``dtype``; they are used up."""
    if dtype == "bfloat16":
        return upper_halves(values)
    with np.errstate(over="ignore", invalid="ignore"):  # beyond float16's range is infinity, as torch has it
        return values.astype(_CARRIERS[dtype], copy=False)


def upper_halves(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return contiguous ``values`` as bfloat16, a view of their own memory, which is used up."""
    lost = np.isnan(values) if values.size and np.isnan(values.max()) else None
    bits = values.view(np.uint32)
    rounding = bits >> np.uint32(16)
    rounding &= np.uint32(1)
    rounding += np.uint32(0x7FFF)
    bits += rounding
    halves = bits.view(np.uint16)[..., 1::2]
    if lost is not None:
        halves[lost] = _QUIET
    return halves
