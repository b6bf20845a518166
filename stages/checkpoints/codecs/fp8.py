"""Weights in FP8 or FP4, or in integers of as many bits, with one scale for each block of a matrix.

What comes out is ``(code as float32 * scale as float32)`` rounded to the dtype in use, as transformers dequantises. A
code of FP8 is a float16 but for its exponent, so shifting its bits makes one, and a table has those of four bits; the
rest is a conversion, a product and a rounding, which torch has vectorised and numpy has not. Its operators run in the
thread that unpacks, and start no others.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from offstage.stages.checkpoints.codecs.loops import SCALE_DTYPES as LOOP_SCALES, Loop, loops
from offstage.stages.checkpoints.codecs.scaled_grid import multiply_blocks
from offstage.stages.checkpoints.device_codec import look_up
from offstage.stages.checkpoints.dtypes import torch_dtype
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.packed import BLOCK_BYTES, PackedBlock, PackedTensor
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.machine.aligned_memory import Bytes
from offstage.stages.machine.operator_threads import alone, elements_alone
from offstage.stages.units import DTYPE_BYTES

Floats = npt.NDArray[np.float32]

TILE = elements_alone(2**17)
"""How many values are unpacked at once: few enough for a core's cache, so many that threads seldom want Python's lock.
"""

DTYPES = ("bfloat16", "float16", "float32", "float64")

Codes = Literal["fp8", "fp4", "int8", "int4"]

_HALF_BIAS, _CODE_BIAS = 15, 7
_HALF_NAN = 0x7E00

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float16)
_INT4 = np.arange(-8, 8).astype(np.float16)


def _pairs(values: npt.NDArray[np.float16]) -> npt.NDArray[np.uint32]:
    """Return the two values of each byte, the low four bits first."""
    return np.stack([np.tile(values, 16), np.repeat(values, 16)], axis=1).view(np.uint32).ravel()


_FP4_PAIRS, _INT4_PAIRS = _pairs(_E2M1), _pairs(_INT4)

_EXPONENTS = np.ldexp(np.float32(1), np.arange(-127, 128))
_SCALES_OF_A_BYTE = {
    "float8_e8m0fnu": np.append(_EXPONENTS, np.float32(np.nan)),
    "uint8": np.append(_EXPONENTS, np.float32(np.inf)),
    "float8_e4m3fn": torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy(),
}
"""What a scale of one byte stands for: a power of two, or FP8 too."""

SCALE_DTYPES = ("float32", "bfloat16", "float16", "float8_e8m0fnu", "uint8")


@dataclass(frozen=True, slots=True)
class BlockScaled:
    """Matrices of codes, each block of ``rows`` times ``columns`` values with a scale of its own.

    A tensor's parts are its codes (…, rows, columns; those of four bits are two to a byte) and its scales (…, blocks
    down, blocks across); the last block of a row or a column may be cut short. A third part is one number that all
    scales are divided by.
    """

    name: Codes
    block_rows: int
    block_columns: int
    dtypes: tuple[str, ...] = DTYPES

    def blocks(self, tensor: PackedTensor) -> tuple[PackedBlock, ...]:
        """Return the blocks of ``tensor``: rows of one matrix, counted through all matrices."""
        *_, rows, columns = tensor.shape
        if not math.prod(tensor.shape):
            return ()
        height = max(1, int(BLOCK_BYTES // (columns * DTYPE_BYTES[tensor.dtype])))
        height -= height % self.block_rows if height > self.block_rows else 0
        found = []
        for first in range(0, math.prod(tensor.shape[:-1]), rows):
            for begin in range(first, first + rows, height):
                end = min(begin + height, first + rows)
                found.append(PackedBlock(self._spans(tensor, begin, end), begin, end))
        return tuple(found)

    def _spans(self, tensor: PackedTensor, begin: int, end: int) -> tuple[Extent, ...]:
        """Return where the codes and the scales lie of rows ``begin`` to ``end``, which are of one matrix."""
        codes, scales, *divisor = tensor.parts
        rows, (down, across) = tensor.shape[-2], scales.shape[-2:]
        matrix, inside = divmod(begin, rows)
        last = -(-(inside + end - begin) // self.block_rows)
        above = matrix * down
        return (
            codes.span_of(begin * codes.shape[-1], end * codes.shape[-1]),
            scales.span_of((above + inside // self.block_rows) * across, (above + last) * across),
            *(part.as_bytes for part in divisor),
        )

    def unpack(self, tensor: PackedTensor, block: PackedBlock, data: Sequence[Bytes], target: Bytes) -> None:
        """Write the rows of ``block`` to their places in ``target``."""
        scales = tensor.parts[1]
        factors = _as_floats(data[1], scales.dtype).reshape(-1, scales.shape[-1])
        if len(data) > 2:
            with np.errstate(all="ignore"):
                np.divide(factors, data[2].view(np.float32), out=factors)
        loop = self._loop(tensor, block, (data[0], factors.view(np.uint8)), target, "float32")
        if loop is not None:
            loop.run()
            return
        codes = data[0].reshape(block.end - block.begin, -1)
        made = target.reshape(math.prod(tensor.shape[:-1]), -1)[block.begin : block.end]
        inside = block.begin % tensor.shape[-2]
        self._unpack_by_operators(codes, factors, torch.from_numpy(made).view(torch_dtype(tensor.dtype)), inside)

    def loop(self, tensor: PackedTensor, block: PackedBlock, data: Sequence[Bytes], target: Bytes) -> Loop | None:
        """Return what unpacks ``block`` at once; null where its scales must be made numbers first."""
        kind = tensor.parts[1].dtype
        return self._loop(tensor, block, data, target, kind) if kind in LOOP_SCALES and len(data) == 2 else None

    def _loop(
        self, tensor: PackedTensor, block: PackedBlock, data: Sequence[Bytes], target: Bytes, scale_dtype: str
    ) -> Loop | None:
        known = loops()
        if known is None or not known.can_scale(self.name, tensor.dtype, self.block_columns):
            return None
        codes, scales = data
        return known.scaled(
            codes.reshape(block.end - block.begin, -1),
            scales.reshape(-1, tensor.parts[1].shape[-1] * int(DTYPE_BYTES[scale_dtype])),
            target.reshape(math.prod(tensor.shape[:-1]), -1)[block.begin : block.end],
            code=self.name,
            dtype=tensor.dtype,
            scale_dtype=scale_dtype,
            inside=block.begin % tensor.shape[-2],
            block=(self.block_rows, self.block_columns),
        )

    def _unpack_by_operators(self, codes: Bytes, factors: Floats, made: torch.Tensor, inside: int) -> None:
        """Write ``codes`` to the rows ``made``, the first of which is the row ``inside`` of its matrix."""
        columns = made.shape[-1]
        tiles = _Tiles(self.name, has_nan=self.name == "fp8" and _has_nan(codes))
        first = inside // self.block_rows
        with alone():
            for left in range(0, columns, TILE):
                piece = slice(left, min(left + TILE, columns))
                at_rest = slice(*(edge * codes.shape[1] // columns for edge in (piece.start, piece.stop)))
                one = factors.shape[-1] == 1
                of_block = np.zeros(1, np.intp) if one else np.arange(piece.start, piece.stop) // self.block_columns
                for begin, end in self._strips(inside, inside + len(codes), piece.stop - piece.start):
                    last = (end - 1) // self.block_rows - first
                    scale = factors[begin // self.block_rows - first : last + 1, of_block]
                    some = slice(begin - inside, end - inside)
                    tiles.fill(codes[some, at_rest], scale, made[some, piece])

    def _strips(self, begin: int, end: int, width: int) -> Iterator[tuple[int, int]]:
        """Yield the rows that are taken together: as many whole blocks as a tile has room for, or a part of one."""
        height = self.block_rows * max(1, TILE // (self.block_rows * width))
        while begin < end:
            whole = min(begin + height, end) // self.block_rows * self.block_rows
            within = begin % self.block_rows or whole <= begin
            stop = min(end, begin + self.block_rows - begin % self.block_rows) if within else whole
            yield begin, stop
            begin = stop

    def tables(self, tensor: PackedTensor) -> tuple[torch.Tensor, ...]:
        """Return the float16 values of each byte of codes, as one number, and what a scale of one byte stands for."""
        kind = tensor.parts[1].dtype
        return (_byte_values(self.name), *((_byte_scales(kind),) if kind in _SCALES_OF_A_BYTE else ()))

    def scratch_bytes(self, tensor: PackedTensor, block: PackedBlock) -> int:
        """Return what the codes as indices, their values as float16, and the scales as float32 take."""
        codes, scales = block.spans[0].bytes, block.spans[1].bytes // int(DTYPE_BYTES[tensor.parts[1].dtype])
        return 4 * codes + 2 * (block.end - block.begin) * tensor.shape[-1] + 12 * scales

    def unpack_on_device(
        self,
        tensor: PackedTensor,
        block: PackedBlock,
        data: Sequence[torch.Tensor],
        tables: Sequence[torch.Tensor],
        target: torch.Tensor,
    ) -> None:
        """Write the rows of ``block`` to their places in ``target``."""
        *_, rows, columns = tensor.shape
        values = look_up(tables[0], data[0]).view(torch.float16).view(-1, columns)
        kind = tensor.parts[1].dtype
        scales = look_up(tables[1], data[1]) if len(tables) > 1 else data[1].view(torch_dtype(kind)).float()
        scales = scales.view(-1, tensor.parts[1].shape[-1])
        if len(data) > 2:
            scales = scales / data[2].view(torch.float32)
        made = target.view(torch_dtype(tensor.dtype)).view(-1, columns)[block.begin : block.end]
        size = {"rows": self.block_rows, "columns": self.block_columns}
        multiply_blocks(values, scales, made, **size, skipped=block.begin % rows % self.block_rows)

    def rows(self, tensor: PackedTensor, begin: int, end: int) -> PackedTensor | None:
        """Return some of the matrices of a stack, or of a matrix the rows of whole blocks; else null."""
        shape = (end - begin, *tensor.shape[1:])
        codes, scales, *divisor = tensor.parts
        if len(shape) == 2:
            if begin % self.block_rows or (end % self.block_rows and end != tensor.shape[0]):
                return None
            first, last = begin // self.block_rows, -(-end // self.block_rows)
        else:
            first, last = begin, end
        parts = (codes.rows(begin, end), scales.rows(first, last), *divisor)
        return replace(tensor, parts=parts, shape=shape)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Memory for one tile: its values as float16, which numpy writes and torch reads, and as float32."""

    bits: npt.NDArray[np.int16]
    halves: torch.Tensor
    floats: torch.Tensor


class _TileMemory(threading.local):
    """A thread's memory for tiles, kept from block to block: new memory costs as much as what is done in it."""

    def __init__(self) -> None:
        self._floats = torch.empty(TILE, dtype=torch.float32, device="cpu")  # aligned, as numpy's would not be
        self._halves = torch.empty(TILE, dtype=torch.int16, device="cpu").numpy()

    def tile(self, rows: int, width: int) -> _Tile:
        """Return memory for a tile of so many values."""
        bits = self._halves[: rows * width].reshape(rows, width)
        floats = self._floats[: rows * width].view(rows, width)
        return _Tile(bits, torch.from_numpy(bits).view(torch.float16), floats)


_MEMORY = _TileMemory()


class _Tiles:
    """Unpacks tile by tile."""

    def __init__(self, name: str, *, has_nan: bool) -> None:
        self._has_nan = has_nan
        self._decode, self._worth = _DECODERS[name]

    def fill(self, codes: Bytes, scale: Floats, made: torch.Tensor) -> None:
        """Unpack ``codes`` to ``made``, both by rows; as many rows as come to one each have the same row of ``scale``.

        That is of one column, or of all.
        """
        rows, width = made.shape
        factor, worth = self._factor(scale)
        height = TILE // width
        for begin in range(0, rows, height):
            some = slice(begin, begin + height)
            tile = _MEMORY.tile(min(height, rows - begin), width)
            self._decode(codes[some], tile.bits)
            if self._has_nan:
                tile.bits[(codes[some] & 0x7F) == 0x7F] = _HALF_NAN
            tile.floats.copy_(tile.halves)
            if worth != 1:
                tile.floats.mul_(worth)
            tile.floats.view(len(factor), -1, width).mul_(factor)
            made[some].copy_(tile.floats)

    def _factor(self, scale: Floats) -> tuple[torch.Tensor, float]:
        """Return what to multiply by, and what else, since the product of both had no room in a float32."""
        with np.errstate(over="ignore", invalid="ignore"):
            both = scale * self._worth
        fits = bool(np.isfinite(both).all())
        return (torch.from_numpy(both if fits else scale)[:, None], 1.0 if fits else float(self._worth))


def _decode_fp8(codes: Bytes, bits: npt.NDArray[np.int16]) -> None:
    np.copyto(bits, codes.view(np.int8))  # the sign goes to the upper bits too
    bits *= np.int16(2**7)  # a shift, which numpy does in twice the time
    bits &= np.int16(-0x4080)  # the sign, and the seven bits that were shifted


def _decode_fp4(codes: Bytes, bits: npt.NDArray[np.int16]) -> None:
    np.take(_FP4_PAIRS, codes, out=bits.view(np.uint32), mode="clip")


def _decode_int8(codes: Bytes, bits: npt.NDArray[np.int16]) -> None:
    np.copyto(bits, codes.view(np.int8))
    bits += np.int16(0x6400 + 128)  # the float16 of 1024, whose last bits are worth one each
    torch.from_numpy(bits).view(torch.float16).sub_(1024 + 128)


def _decode_int4(codes: Bytes, bits: npt.NDArray[np.int16]) -> None:
    np.take(_INT4_PAIRS, codes, out=bits.view(np.uint32), mode="clip")


_DECODERS = {
    "fp8": (_decode_fp8, np.float32(2.0 ** (_HALF_BIAS - _CODE_BIAS))),
    "fp4": (_decode_fp4, np.float32(1)),
    "int8": (_decode_int8, np.float32(1)),
    "int4": (_decode_int4, np.float32(1)),
}
"""What makes float16 of a format's codes, and what a code is worth more than that float16."""


@lru_cache
def _byte_values(name: Codes) -> torch.Tensor:
    """Return the one or two values that each byte stands for, as float16, in an integer as wide."""
    every = np.arange(256, dtype=np.uint8)
    match name:
        case "fp8":
            halves = torch.from_numpy(every).view(torch.float8_e4m3fn).to(torch.float16)
            return halves.view(torch.int16)
        case "int8":
            return torch.from_numpy(every.view(np.int8)).to(torch.float16).view(torch.int16)
        case "fp4":
            return torch.from_numpy(_FP4_PAIRS.view(np.int32))
        case "int4":
            return torch.from_numpy(_INT4_PAIRS.view(np.int32))


@lru_cache
def _byte_scales(dtype: str) -> torch.Tensor:
    return torch.from_numpy(_SCALES_OF_A_BYTE[dtype])


def _has_nan(codes: Bytes) -> bool:
    return bool(codes.max() == 0xFF or codes.view(np.int8).max() == 0x7F)


def _as_floats(data: Bytes, dtype: str) -> Floats:
    """Return scales as float32."""
    if dtype in _SCALES_OF_A_BYTE:
        return _SCALES_OF_A_BYTE[dtype][data]
    if dtype == "bfloat16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data.view(dtype).astype(np.float32)


FORMATS = tuple(_DECODERS)
_OF_FOUR_BITS = ("fp4", "int4")


def sample(name: Codes = "fp8") -> tuple[PackedTensor, PackedBlock, list[Bytes]]:
    """Return a tensor of one block, that block and its bytes, made up: what the rate of ``name`` is measured by."""
    rows, columns, size = 512, 4096, 128
    wide = columns // 2 if name in _OF_FOUR_BITS else columns
    file = ShardFile("sample", Path("sample"), 0, None, "")
    scales = np.full((rows // size, columns // size), 2.0**-12, np.float32)
    parts = Extent(file, 0, "uint8", (rows, wide)), Extent(file, 0, "float32", scales.shape)
    tensor = PackedTensor(BlockScaled(name, size, size), parts, "bfloat16", (rows, columns))
    codes = np.arange(rows * wide, dtype=np.uint32) * np.uint32(2654435761) >> 24
    (block,) = tensor.codec.blocks(tensor)
    return tensor, block, [codes.astype(np.uint8) & np.uint8(0xF7), scales.view(np.uint8).ravel()]
