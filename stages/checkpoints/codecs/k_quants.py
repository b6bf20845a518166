"""ggml's k-quants as float32: blocks of 256 values, cut into runs whose scales are themselves packed.

How the bytes lie is the format's. Operations and their order are those of the ``gguf`` package, so that the bits are
the same.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[np.uint8]
Values = npt.NDArray[np.float32]


def unpack_q4_k(blocks: Blocks, out: Values) -> None:
    """Write the values of blocks (n, 144) to (n, 256): eight runs of 32, four bits each, a scale and a minimum."""
    packed = blocks[:, 16:].reshape(-1, 4, 32)
    runs = out.reshape(-1, 4, 2, 32)
    runs[:, :, 0] = packed & np.uint8(15)
    runs[:, :, 1] = packed >> np.uint8(4)
    _scale_runs(blocks, out)


def unpack_q5_k(blocks: Blocks, out: Values) -> None:
    """Write the values of blocks (n, 176) to (n, 256): as ``unpack_q4_k`` does, with a plane of fifth bits."""
    packed = blocks[:, 48:].reshape(-1, 4, 32)
    fifth = np.ascontiguousarray(blocks[:, 16:48])
    runs = out.reshape(-1, 4, 2, 32)
    for run in range(8):
        bits = fifth >> np.uint8(run)
        bits &= np.uint8(1)
        bits <<= np.uint8(4)
        half = packed[:, run // 2]
        bits |= half >> np.uint8(4) if run % 2 else half & np.uint8(15)
        runs[:, run // 2, run % 2] = bits
    _scale_runs(blocks, out)


def unpack_q6_k(blocks: Blocks, out: Values) -> None:
    """Write the values of blocks (n, 210) to (n, 256): sixteen runs of 16, six bits each, a scale."""
    low, high = blocks[:, :128].reshape(-1, 2, 64), blocks[:, 128:192].reshape(-1, 2, 32)
    runs = out.reshape(-1, 2, 2, 2, 32)
    for quarter in range(4):
        upper, lower = divmod(quarter, 2)
        bits = high >> np.uint8(2 * quarter)
        bits &= np.uint8(3)
        bits <<= np.uint8(4)
        half = low[:, :, 32 * lower : 32 * lower + 32]
        bits |= half >> np.uint8(4) if upper else half & np.uint8(15)
        runs[:, :, upper, lower] = bits
    out -= np.float32(32)
    scales = _halves(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    sixteens = out.reshape(-1, 16, 16)
    sixteens *= scales[:, :, None]


def _scale_runs(blocks: Blocks, out: Values) -> None:
    """Scale the eight runs of each block and take their minima off; both are six bits, under a float16 each."""
    first, second, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate(
        [first & np.uint8(63), (mixed & np.uint8(15)) | ((first >> np.uint8(2)) & np.uint8(48))], axis=1
    )
    minima = np.concatenate(
        [second & np.uint8(63), (mixed >> np.uint8(4)) | ((second >> np.uint8(2)) & np.uint8(48))], axis=1
    )
    runs = out.reshape(-1, 8, 32)
    runs *= (_halves(blocks, 0) * scales.astype(np.float32))[:, :, None]
    runs -= (_halves(blocks, 2) * minima.astype(np.float32))[:, :, None]


def _halves(blocks: Blocks, begin: int) -> Values:
    """Return the float16 at byte ``begin`` of each block, as a column."""
    return np.ascontiguousarray(blocks[:, begin : begin + 2]).view(np.float16).astype(np.float32)
