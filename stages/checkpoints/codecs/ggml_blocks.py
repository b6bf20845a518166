"""The blocks that ggml packs weights in, as float32 on any device: by torch's operators.

A block is some values of one row and what they are scaled by; k-quants have 256 values in runs, whose scales are
packed too. How the bytes lie is the format's. Each function computes what the ``gguf`` package's ``dequantize`` does,
operation for operation, so that the bits are the same: a product and a sum are two operators, since together they would
be rounded once and not twice. Types that have no function here are unpacked by that package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

_ONES = 0x0101010101010101
"""One in each of eight bytes."""
_DIAGONAL = int.from_bytes([1 << bit for bit in range(8)], "little", signed=True)
"""The first bit in the first of eight bytes, the last in the last."""


def _halves(blocks: Tensor, begin: int) -> Tensor:
    """Return the float16 at byte ``begin`` of each block, as float32 in a column."""
    return blocks[:, begin : begin + 2].view(torch.float16).float()


def _unpack_q8_0(blocks: Tensor, out: Tensor) -> None:
    torch.mul(blocks[:, 2:].view(torch.int8), _halves(blocks, 0), out=out)


def _unpack_q4_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, None, 2:], out.view(-1, 1, 2, 16))
    out -= 8
    out *= _halves(blocks, 0)


def _unpack_q4_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, None, 4:], out.view(-1, 1, 2, 16))
    out *= _halves(blocks, 0)
    out += _halves(blocks, 2)


def _unpack_q5_0(blocks: Tensor, out: Tensor) -> None:
    _five_bits(blocks[:, 6:], blocks[:, 2:6], out)
    out -= 16
    out *= _halves(blocks, 0)


def _unpack_q5_1(blocks: Tensor, out: Tensor) -> None:
    _five_bits(blocks[:, 8:], blocks[:, 4:8], out)
    out *= _halves(blocks, 0)
    out += _halves(blocks, 2)


def _unpack_q4_k(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 16:].view(-1, 4, 32), out.view(-1, 4, 2, 32))
    _scale_runs(blocks, out)


def _unpack_q5_k(blocks: Tensor, out: Tensor) -> None:
    codes = _codes(blocks[:, 48:].view(-1, 4, 32))
    codes |= _planes(blocks[:, None, 16:48], bits=1).view(-1, 256)
    out.copy_(codes)
    _scale_runs(blocks, out)


def _unpack_q6_k(blocks: Tensor, out: Tensor) -> None:
    codes = _codes(blocks[:, :128].view(-1, 2, 64))
    codes |= _planes(blocks[:, 128:192].view(-1, 2, 1, 32), bits=2).view(-1, 256)
    out.copy_(codes)
    out -= 32
    scales = _halves(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    out.view(-1, 16, 16).mul_(scales[:, :, None])


def _nibbles(packed: Tensor, out: Tensor) -> None:
    """Write the low halves of ``packed`` (n, m, k), and then the high ones, to ``out`` (n, m, 2, k)."""
    out[:, :, 0] = packed & 15  # with out=, accelerators write integers alone
    out[:, :, 1] = packed >> 4


def _codes(packed: Tensor) -> Tensor:
    """Return the same as bytes, (n, 256)."""
    codes = packed.new_empty((len(packed), packed.shape[1], 2, packed.shape[2]))
    _nibbles(packed, codes)
    return codes.view(-1, 256)


def _planes(packed: Tensor, *, bits: int) -> Tensor:
    """Return for each byte of ``packed`` (…, 1, k) its pieces of so many ``bits``, the lowest first (…, 8 / bits, k);
    they stand above four others. Eight bytes are shifted at once.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.int64, device=packed.device)
    pieces = packed.contiguous().view(torch.int64) >> shifts[:, None]
    return pieces.bitwise_and_((2**bits - 1) * _ONES).bitwise_left_shift_(4).view(torch.uint8)


def _five_bits(packed: Tensor, fifth: Tensor, out: Tensor) -> None:
    """Write the low halves of 16 bytes, then the high ones, each with a fifth bit from four bytes more."""
    each = (fifth.to(torch.int64) * _ONES).bitwise_and_(_DIAGONAL)  # a bit of the byte in each of eight
    codes = each.add_(127 * _ONES).bitwise_right_shift_(7).bitwise_and_(_ONES).bitwise_left_shift_(4)
    codes = codes.view(torch.uint8)
    codes[:, :16] |= packed & 15
    codes[:, 16:] |= packed >> 4
    out.copy_(codes)


def _scale_runs(blocks: Tensor, out: Tensor) -> None:
    """Scale the eight runs of each block and take their minima off; both are six bits, under a float16 each."""
    first, second, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, (mixed & 15) | ((first >> 2) & 48)], 1)
    minima = torch.cat([second & 63, (mixed >> 4) | ((second >> 2) & 48)], 1)
    runs = out.view(-1, 8, 32)
    runs *= (_halves(blocks, 0) * scales)[:, :, None]
    runs -= (_halves(blocks, 2) * minima)[:, :, None]


def _plain(dtype: torch.dtype) -> Callable[[Tensor, Tensor], None]:
    def unpack(blocks: Tensor, out: Tensor) -> None:
        out.copy_(blocks.view(dtype))

    return unpack


UNPACK: Mapping[str, Callable[[Tensor, Tensor], None]] = {
    "f32": _plain(torch.float32),
    "f16": _plain(torch.float16),
    "bf16": _plain(torch.bfloat16),
    "q4_0": _unpack_q4_0,
    "q4_1": _unpack_q4_1,
    "q5_0": _unpack_q5_0,
    "q5_1": _unpack_q5_1,
    "q8_0": _unpack_q8_0,
    "q4_k": _unpack_q4_k,
    "q5_k": _unpack_q5_k,
    "q6_k": _unpack_q6_k,
}
"""What writes blocks (n, bytes) of each of ggml's types to (n, elements), as float32."""
