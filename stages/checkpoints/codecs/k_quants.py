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
    codes = _nibbles(blocks[:, 48:].reshape(-1, 4, 32))
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]
    fifth &= np.uint8(1)
    fifth <<= np.uint8(4)
    codes |= fifth.reshape(-1, 256)
    out[...] = codes
    _scale_runs(blocks, out)


def unpack_q6_k(blocks: Blocks, out: Values) -> None:
    """Write the values of blocks (n, 210) to (n, 256): sixteen runs of 16, six bits each, a scale."""
    codes = _nibbles(blocks[:, :128].reshape(-1, 2, 64))
    upper = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    upper &= np.uint8(3)
    upper <<= np.uint8(4)
    codes |= upper.reshape(-1, 256)
    out[...] = codes
    out -= np.float32(32)
    scales = halves(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    out *= _for_each(scales, 16)


def _nibbles(packed: Blocks) -> Blocks:
    """Return the low halves of each row of ``packed`` (n, m, k) and then the high ones, as (n, 256)."""
    codes = np.empty((*packed.shape[:2], 2, packed.shape[2]), np.uint8)
    np.bitwise_and(packed, np.uint8(15), out=codes[:, :, 0])
    np.right_shift(packed, np.uint8(4), out=codes[:, :, 1])
    return codes.reshape(-1, 256)


def _scale_runs(blocks: Blocks, out: Values) -> None:
    """Scale the eight runs of each block and take their minima off; both are six bits, under a float16 each."""
    head = np.ascontiguousarray(blocks[:, 4:16].T)  # (12, n): loops over blocks are long ones
    first, second, mixed = head[:4], head[4:8], head[8:]
    scales = np.concatenate([first & np.uint8(63), (mixed & np.uint8(15)) | ((first >> np.uint8(2)) & np.uint8(48))])
    minima = np.concatenate([second & np.uint8(63), (mixed >> np.uint8(4)) | ((second >> np.uint8(2)) & np.uint8(48))])
    out *= _for_each((halves(blocks, 0).T * scales.astype(np.float32)).T, 32)
    out -= _for_each((halves(blocks, 2).T * minima.astype(np.float32)).T, 32)


def _for_each(scales: Values, run: int) -> Values:
    """Return ``scales`` (n, m) once for each value of a run, as (n, 256): one long loop is faster than many short."""
    return np.repeat(scales.reshape(-1), run).reshape(-1, 256)


def halves(blocks: Blocks, begin: int) -> Values:
    """Return the float16 at byte ``begin`` of each block, as a column."""
    return np.ascontiguousarray(blocks[:, begin : begin + 2]).view(np.float16).astype(np.float32)
