"""The blocks that ggml packs weights in, as float32: 32 values with a scale each, and plain values.

A block is some values of one row and what they are scaled by; how the bytes lie is the format's. Each function computes
what the ``gguf`` package's ``dequantize`` does, operation for operation, so that the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from offstage.stages.checkpoints.codecs.k_quants import Blocks, Values, halves, unpack_q4_k, unpack_q5_k, unpack_q6_k


def _unpack_q8_0(blocks: Blocks, out: Values) -> None:
    out[...] = blocks[:, 2:].view(np.int8)
    out *= halves(blocks, 0)


def _unpack_q4_0(blocks: Blocks, out: Values) -> None:
    _nibbles(blocks[:, 2:], out)
    out -= np.float32(8)
    out *= halves(blocks, 0)


def _unpack_q4_1(blocks: Blocks, out: Values) -> None:
    _nibbles(blocks[:, 4:], out)
    out *= halves(blocks, 0)
    out += halves(blocks, 2)


def _unpack_q5_0(blocks: Blocks, out: Values) -> None:
    _five_bits(blocks[:, 6:], blocks[:, 2:6], out)
    out -= np.float32(16)
    out *= halves(blocks, 0)


def _unpack_q5_1(blocks: Blocks, out: Values) -> None:
    _five_bits(blocks[:, 8:], blocks[:, 4:8], out)
    out *= halves(blocks, 0)
    out += halves(blocks, 2)


def _nibbles(packed: Blocks, out: Values) -> None:
    """Write the low halves of 16 bytes, then the high ones."""
    out[:, :16] = packed & np.uint8(15)
    out[:, 16:] = packed >> np.uint8(4)


def _five_bits(packed: Blocks, fifth: Blocks, out: Values) -> None:
    """Do as ``_nibbles``, with a fifth bit for each value from four bytes more."""
    bits = np.unpackbits(np.ascontiguousarray(fifth), axis=1, bitorder="little")
    bits <<= np.uint8(4)
    bits[:, :16] |= packed & np.uint8(15)
    bits[:, 16:] |= packed >> np.uint8(4)
    out[...] = bits


def _unpack_f32(blocks: Blocks, out: Values) -> None:
    out[...] = np.ascontiguousarray(blocks).view(np.float32)


def _unpack_f16(blocks: Blocks, out: Values) -> None:
    out[...] = np.ascontiguousarray(blocks).view(np.float16)


def _unpack_bf16(blocks: Blocks, out: Values) -> None:
    bits = out.view(np.uint32)
    bits[...] = np.ascontiguousarray(blocks).view(np.uint16)
    bits <<= np.uint32(16)


UNPACK: Mapping[str, Callable[[Blocks, Values], None]] = {
    "f32": _unpack_f32,
    "f16": _unpack_f16,
    "bf16": _unpack_bf16,
    "q4_0": _unpack_q4_0,
    "q4_1": _unpack_q4_1,
    "q5_0": _unpack_q5_0,
    "q5_1": _unpack_q5_1,
    "q8_0": _unpack_q8_0,
    "q4_k": unpack_q4_k,
    "q5_k": unpack_q5_k,
    "q6_k": unpack_q6_k,
}
"""What writes blocks (n, bytes) of each of ``FORMATS`` to (n, elements)."""
