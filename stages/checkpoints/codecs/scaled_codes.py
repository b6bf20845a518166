"""Weights in codes of four or eight bits with scales: FP8, FP4, INT8, INT4, MXFP4 and the tables of bitsandbytes.

What comes out is ``(code as float32 * scale as float32)`` rounded to the dtype in use, as the libraries dequantise. Two
codes are looked up at once, in a table that has what both stand for.

Three layouts differ in where rows lie. Matrices have theirs in order. MXFP4, as gpt-oss has it, is stacks of experts
whose rows at rest are columns in use. Codes of a table are one long row, cut into runs that share a scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from offstage.stages.checkpoints.codecs.loops import Loop, ScaleLayout, loops
from offstage.stages.checkpoints.device_codec import DeviceCodec, look_up, most_at_once, tiles
from offstage.stages.checkpoints.dtypes import torch_dtype
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.packed import BLOCK_BYTES, PackedBlock, PackedTensor
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.machine.aligned_memory import Bytes
from offstage.stages.units import DTYPE_BYTES

DTYPES = ("bfloat16", "float16", "float32", "float64")
SCALE_DTYPES = ("float32", "bfloat16", "float16", "float8_e8m0fnu", "uint8")
NAMES = ("fp8", "fp4", "int8", "int4", "nf4", "mxfp4")
"""What rates of such codes are known by."""
RUNS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""How many values of a table may share a scale."""
MXFP4_GROUP = 32
"""How many values of an MXFP4 stack do."""

Codes = Literal["fp8", "fp4", "int8", "int4"]

_OF_EIGHT_BITS = ("fp8", "int8")
_HALVES = {torch.int32: torch.int16, torch.int64: torch.int32}
"""Numbers of half the size, by those that are two values."""
_COLUMNS_TOGETHER = 32
"""Rows that become columns are cut so that these fill whole cache lines in use."""


@dataclass(frozen=True, slots=True)
class PackedScales:
    """Scales that are codes: the 256 values that these stand for, how many share a scale, what is added to all."""

    values: tuple[float, ...]
    run: int
    offset: float


@dataclass(frozen=True, slots=True)
class ScaledCodes(DeviceCodec):
    """Matrices of codes, each block of ``block_rows`` times ``block_columns`` values with a scale of its own.

    A tensor's parts are its codes (…, rows, columns; those of four bits are two to a byte, the low one first) and its
    scales (…, blocks down, blocks across); the last block of a row or a column may be cut short. A third part is one
    number that all scales are divided by.

    Where there are ``values``, 16 of them, a code is the number of one, the upper four bits first; a block is a run,
    and so is a row: of all values in the order in use. Scales of those may be ``nested``; the third part is their own
    scales. What is ``transposed`` is experts, each of which has columns at rest for rows in use.

    Its blocks are counted in rows at rest, through all matrices.
    """

    name: str
    block_rows: int
    block_columns: int
    dtypes: tuple[str, ...] = DTYPES
    values: tuple[float, ...] = ()
    nested: PackedScales | None = None
    transposed: bool = False

    def blocks(self, tensor: PackedTensor) -> tuple[PackedBlock, ...]:
        """Return the blocks of ``tensor``: rows of one matrix."""
        matrices, rows, columns = self._grid(tensor)
        if not math.prod(tensor.shape):
            return ()
        height = max(1, int(BLOCK_BYTES // (columns * DTYPE_BYTES[tensor.dtype])))
        whole = _COLUMNS_TOGETHER if self.transposed else self.block_rows
        height -= height % whole if height > whole else 0
        edges = [
            (first + at, first + min(at + height, rows))
            for first in range(0, matrices * rows, rows)
            for at in range(0, rows, height)
        ]
        return tuple(PackedBlock(self._spans(tensor, begin, end), begin, end) for begin, end in edges)

    def _grid(self, tensor: PackedTensor) -> tuple[int, int, int]:
        """Return how many matrices ``tensor`` has at rest, and the rows and columns of one."""
        if self.values:
            return 1, math.prod(tensor.shape) // self.block_columns, self.block_columns
        *stack, rows, columns = tensor.shape
        return math.prod(stack), *((columns, rows) if self.transposed else (rows, columns))

    def _scale_grid(self, tensor: PackedTensor) -> tuple[int, int]:
        """Return how many scales a matrix has down and across."""
        _, rows, columns = self._grid(tensor)
        return -(-rows // self.block_rows), -(-columns // self.block_columns)

    def _spans(self, tensor: PackedTensor, begin: int, end: int) -> tuple[Extent, ...]:
        """Return where the codes and the scales lie of rows ``begin`` to ``end``, which are of one matrix."""
        if self.values:
            return tuple(part.as_bytes for part in self._runs(tensor, begin, end))
        codes, scales, *divisor = tensor.parts
        (_, rows, _), (down, across) = self._grid(tensor), self._scale_grid(tensor)
        width = self._row_bytes(tensor)
        matrix, inside = divmod(begin, rows)
        first, last = inside // self.block_rows, -(-(inside + end - begin) // self.block_rows)
        return (
            codes.as_bytes.span_of(begin * width, end * width),
            scales.span_of((matrix * down + first) * across, (matrix * down + last) * across),
            *(part.as_bytes for part in divisor),
        )

    def _row_bytes(self, tensor: PackedTensor) -> int:
        """Return the bytes of a row of codes."""
        return self._grid(tensor)[2] // (1 if self.name in _OF_EIGHT_BITS else 2)

    def loop(self, tensor: PackedTensor, block: PackedBlock, data: Sequence[Bytes], target: Bytes) -> Loop | None:
        """Return what unpacks ``block`` at once; null where there is no loop for it."""
        compiled, height = loops(), block.end - block.begin
        if compiled is None or not compiled.can_scale(self.code, tensor.dtype, self.block_columns):
            return None
        codes, scales, *above = data
        if self.transposed:
            table = _scaled_pairs(tensor.dtype).numpy().view(f"u{2 * torch_dtype(tensor.dtype).itemsize}")
            expert, row = divmod(block.begin, tensor.shape[-1])
            rows_target = target.view(f"u{table.itemsize // 2}").reshape(tensor.shape)[expert, :, row : row + height]
            own = codes.reshape(height, -1), scales.reshape(height, -1)
            return compiled.mxfp4(*own, table, rows_target, dtype=tensor.dtype)
        kind, (matrices, rows, _) = tensor.parts[1].dtype, self._grid(tensor)
        nested = (_floats(self.nested.values).numpy(), self.nested.run, self.nested.offset) if self.nested else None
        layout = ScaleLayout(
            code=self.code,
            scale_dtype=kind,
            inside=block.begin % rows,
            block=(self.block_rows, self.block_columns),
            values=value_table(self.code, self.values).numpy().view(np.uint64) if self.values else None,
            above=above[0] if above else None,
            nested=nested,
        )
        scales = scales.reshape(-1, self._scale_grid(tensor)[1] * int(DTYPE_BYTES[kind]))
        rows_target = target.reshape(matrices * rows, -1)[block.begin : block.end]
        return compiled.scaled(codes.reshape(height, -1), scales, rows_target, dtype=tensor.dtype, layout=layout)

    def _is_odd(self, tensor: PackedTensor) -> bool:
        """Return whether codes of eight bits aren't pairs in each row."""
        return self.name in _OF_EIGHT_BITS and self._grid(tensor)[2] % 2 == 1

    @property
    def code(self) -> str:
        """What its codes are: a format of their own, or numbers of a table's values."""
        return "table" if self.values else self.name

    def tables(self, tensor: PackedTensor) -> tuple[torch.Tensor, ...]:
        """Return the float32 values of two codes, as one number, and what a scale of one byte stands for; of MXFP4 the
        values of two codes at each scale, in the dtype in use.
        """
        kind = tensor.parts[1].dtype
        if self.transposed:
            return (_scaled_pairs(tensor.dtype),)
        values = value_table(self.code, self.values, single=self._is_odd(tensor))
        if self.nested:
            return values, _floats(self.nested.values)
        return (values, byte_scales(kind)) if DTYPE_BYTES[kind] == 1 else (values,)

    def scratch_bytes(self, tensor: PackedTensor, block: PackedBlock) -> int:
        """Return what the codes take as indices, and as values, their scales and those above, and words in order."""
        _, _, columns = self._grid(tensor)
        values, each = (block.end - block.begin) * columns, 1 if self._is_odd(tensor) else 2
        scales = block.spans[1].bytes // int(DTYPE_BYTES[tensor.parts[1].dtype])
        width = int(DTYPE_BYTES[tensor.dtype]) if self.transposed else 4
        words = values // 2 if self.transposed else 0
        return 4 * values // each + words + width * values + (24 if self.nested else 12) * scales

    def unpack_on_device(
        self,
        tensor: PackedTensor,
        block: PackedBlock,
        data: Sequence[torch.Tensor],
        tables: Sequence[torch.Tensor],
        target: torch.Tensor,
    ) -> None:
        """Write the rows of ``block`` to their places in ``target``."""
        if self.transposed:
            self._unpack_columns(tensor, block, data, tables, target)
            return
        (_, rows, columns), (_, across) = self._grid(tensor), self._scale_grid(tensor)
        scales = self._scales(tensor, block, data, tables).view(-1, across)
        target_rows = target.view(torch_dtype(tensor.dtype)).view(-1, columns)[block.begin : block.end]
        skipped, each = block.begin % rows % self.block_rows, 1 if self._is_odd(tensor) else 2
        most = min(most_at_once(target), target_rows.numel())
        kind = torch.uint16 if each == 2 and self.name in _OF_EIGHT_BITS else torch.uint8
        codes = data[0].view(kind).view(len(target_rows), -1)
        places = torch.empty(most // each, dtype=torch.int32, device=target.device)
        buffer = tables[0].new_empty(len(places), device=target.device)
        for some, part in tiles(len(target_rows), columns, most=most, height=self.block_rows, width=2):
            at_rest = codes[some, part.start // each : part.stop // each]
            indices = places[: at_rest.numel()].view(at_rest.shape).copy_(at_rest)
            numbers = torch.index_select(tables[0], 0, indices.view(-1), out=buffer[: indices.numel()])
            values = numbers.view(torch.float32).view(len(at_rest), -1)
            self._multiply(values, scales, down=skipped + some.start, right=part.start)
            target_rows[some, part].copy_(values)

    def _unpack_columns(
        self,
        tensor: PackedTensor,
        block: PackedBlock,
        data: Sequence[torch.Tensor],
        tables: Sequence[torch.Tensor],
        target: torch.Tensor,
    ) -> None:
        """Write the rows of ``block`` as columns. What changes its order are words of eight codes, not their values."""
        expert, row = divmod(block.begin, tensor.shape[-1])
        rows, kind = block.end - block.begin, _HALVES[tables[0].dtype]
        blocks = target.view(kind).view(tensor.shape[0], -1, 4, 4, 2, tensor.shape[2])[expert, ..., row : row + rows]
        words = data[0].view(torch.int32).view(rows, -1, 4).permute(1, 2, 0).contiguous()
        above = data[1].view(rows, -1).T.to(torch.int32, memory_format=torch.contiguous_format).mul_(256)[:, None]
        most = min(2 * most_at_once(target) // MXFP4_GROUP, rows * len(words))
        places = torch.empty(16 * most, dtype=torch.int32, device=target.device)
        buffer = tables[0].new_empty(len(places), device=target.device)
        shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=target.device)[:, None, None, None]
        byte, half = (
            shifts.new_full((), number) for number in (255, 8 * kind.itemsize)
        )  # a number would be one each time
        for groups, some in tiles(len(words), rows, most=most, height=1, width=1):
            in_order = words[groups, :, some]
            indices = places[: 4 * in_order.numel()].view(4, *in_order.shape)
            torch.bitwise_right_shift(in_order, shifts, out=indices).bitwise_and_(byte).add_(above[groups, :, some])
            pairs = torch.index_select(tables[0], 0, indices.view(-1), out=buffer[: indices.numel()]).view(
                indices.shape
            )
            lines = blocks[groups, ..., some].permute(2, 3, 0, 1, 4)
            lines[:, 0].copy_(pairs)
            lines[:, 1].copy_(pairs.bitwise_right_shift_(half))

    def _scales(
        self, tensor: PackedTensor, block: PackedBlock, data: Sequence[torch.Tensor], tables: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return the scales of ``block`` as numbers."""
        if self.nested:
            runs = torch.arange(block.begin, block.end, dtype=torch.int32, device=data[0].device)
            runs = runs.floor_divide_(self.nested.run).sub_(block.begin // self.nested.run)
            above = data[2].view(torch.float32).index_select(0, runs)
            return look_up(tables[1], data[1]).mul_(above).add_(self.nested.offset)
        kind = torch_dtype(tensor.parts[1].dtype)
        scales = look_up(tables[1], data[1]) if len(tables) > 1 else data[1].view(kind).float()
        return scales / data[2].view(torch.float32) if len(data) > 2 else scales

    def _multiply(self, values: torch.Tensor, scales: torch.Tensor, *, down: int, right: int) -> None:
        """Multiply ``values`` (height, width) by their ``scales``: so many rows ``down`` and columns to the ``right``
        of where the first scale's begin these are.
        """
        for top, bottom in _lines(len(values), self.block_rows, down):
            for left, end in _lines(values.shape[1], self.block_columns, right):
                count, wide = max(1, (bottom - top) // self.block_rows), max(1, (end - left) // self.block_columns)
                first, second = (down + top) // self.block_rows, (right + left) // self.block_columns
                some = scales[first : first + count, second : second + wide][:, None, :, None]
                part = values[top:bottom, left:end]
                part.view(count, len(part) // count, wide, -1).mul_(some)

    def rows(self, tensor: PackedTensor, begin: int, end: int) -> PackedTensor | None:
        """Return some matrices of a stack, of one matrix the rows of whole blocks, or of whole runs; else null."""
        shape = (end - begin, *tensor.shape[1:])
        if self.values:
            width = math.prod(tensor.shape[1:])
            first, last = begin * width // self.block_columns, end * width // self.block_columns
            cut = begin * width % self.block_columns or end * width % self.block_columns
            if cut or (self.nested and first % self.nested.run):
                return None
            return replace(tensor, parts=self._runs(tensor, first, last), shape=shape)
        codes, scales, *divisor = tensor.parts
        first, last = begin, end
        if len(shape) == 2:
            if begin % self.block_rows or (end % self.block_rows and end != tensor.shape[0]):
                return None
            first, last = begin // self.block_rows, -(-end // self.block_rows)
        return replace(tensor, parts=(codes.rows(begin, end), scales.rows(first, last), *divisor), shape=shape)

    def _runs(self, tensor: PackedTensor, begin: int, end: int) -> tuple[Extent, ...]:
        """Return where the codes and scales of runs ``begin`` to ``end`` lie."""
        codes, scales, *above = tensor.parts
        width, run = self.block_columns // 2, self.nested.run if self.nested else 1
        return (
            codes.flat.rows(begin * width, end * width),
            scales.flat.rows(begin, end),
            *(part.flat.rows(begin // run, -(-end // run)) for part in above),
        )


MXFP4 = ScaledCodes("mxfp4", 1, MXFP4_GROUP, DTYPES[:3], transposed=True)
"""What unpacks the stacks of gpt-oss."""


def table_codes(
    values: tuple[float, ...], run: int, nested: PackedScales | None, dtypes: tuple[str, ...]
) -> ScaledCodes:
    """Return what unpacks codes that are numbers of 16 ``values``, a scale for each ``run`` of them."""
    return ScaledCodes("nf4", 1, run, dtypes, values, nested)


def _lines(count: int, size: int, skipped: int) -> Iterator[tuple[int, int]]:
    """Yield ``count`` lines in runs: whole blocks of ``size`` together, those that are cut at either end alone."""
    lead = min(count, -skipped % size)
    whole = (count - lead) // size * size
    yield from ((begin, end) for begin, end in pairwise((0, lead, lead + whole, count)) if begin < end)


@cache
def value_table(code: str, values: tuple[float, ...] = (), *, single: bool = False) -> torch.Tensor:
    """Return the two float32 values that each byte stands for, or two bytes of eight bits, in an integer as wide; of a
    ``single`` byte, its one value.
    """
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    floats = (*magnitudes, *(-value for value in magnitudes))
    if code in _OF_EIGHT_BITS:
        every = torch.arange(256, dtype=torch.uint8)
        values_of = every.view(torch.float8_e4m3fn if code == "fp8" else torch.int8).float()
    elif code == "int4":
        values_of = torch.arange(-8, 8).float()
    else:
        values_of = _floats(values or floats)
    if single:
        return values_of.view(torch.int32)
    low, high = values_of.repeat(len(values_of)), values_of.repeat_interleave(len(values_of))
    return torch.stack((high, low) if values else (low, high), 1).view(torch.int64).view(-1)


@cache
def byte_scales(dtype: str) -> torch.Tensor:
    """Return what a scale of one byte stands for: FP8, or a power of two."""
    every = torch.arange(256, dtype=torch.uint8)
    if dtype == "uint8":
        return torch.ldexp(torch.ones(256), torch.arange(256) - 127)
    return every.view(torch_dtype(dtype)).float()


@cache
def _floats(values: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


@cache
def _scaled_pairs(dtype: str) -> torch.Tensor:
    """Return for each scale and byte of MXFP4 (``scale · 256 + byte``) the two values, as one number.

    They are what transformers computes, by the same function: at the ends of the exponents too.
    """
    kind = torch_dtype(dtype)
    pairs = value_table("fp4").view(torch.float32).to(kind).repeat(256, 1)
    torch.ldexp(pairs, torch.arange(256, dtype=torch.int32)[:, None] - 127, out=pairs)
    return pairs.view({2: torch.int32, 4: torch.int64}[kind.itemsize]).view(-1)


def sample(name: str) -> tuple[PackedTensor, PackedBlock, list[Bytes]]:
    """Return a tensor of one block, that block and its bytes, made up: what the rate of ``name`` is measured by."""
    rows, columns, size = 512, 4096, 128
    every = np.arange(rows * columns, dtype=np.uint32) * np.uint32(2654435761) >> 24
    codes = every[: rows * columns // (1 if name in _OF_EIGHT_BITS else 2)].astype(np.uint8) & np.uint8(0xF7)
    shape: tuple[int, ...] = rows, columns
    scales = np.full((rows // size, columns // size), 2.0**-12, np.float32)
    data: list[npt.NDArray[np.generic]] = [codes.reshape(rows, -1), scales]
    codec = ScaledCodes(name, size, size)
    if name == "mxfp4":
        rows, columns = shape[1] // 2, 2 * rows
        shape = 1, rows, columns
        exponents = every[: codes.size // 16].astype(np.uint8) % np.uint8(15) + np.uint8(110)
        data = [codes.reshape(1, columns, -1, 16), exponents.reshape(1, columns, -1)]
        codec = MXFP4
    if name == "nf4":
        above = np.full(codes.size // 2**13, 0.01, np.float32)
        data = [codes, every[: codes.size // 32].astype(np.uint8), above]
        nested = PackedScales((*map(float, np.linspace(-1, 1, 256, dtype=np.float32)),), 256, 0.05)
        codec = table_codes((*map(float, np.linspace(-1, 1, 16, dtype=np.float32)),), 64, nested, ("bfloat16",))
    file = ShardFile("sample", Path("sample"), 0, None, "")
    tensor = PackedTensor(codec, tuple(Extent(file, 0, str(d.dtype), d.shape) for d in data), "bfloat16", shape)
    block = next(iter(codec.blocks(tensor)))
    return tensor, block, [part.view(np.uint8).ravel() for part in data]
