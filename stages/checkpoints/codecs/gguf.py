"""Tensors of a GGUF file: rows of ggml's blocks, unpacked to where the model has those rows.

Whoever wrote the file has changed some tensors for llama.cpp: rows in another order, a matrix transposed, one added to
a norm, the halves of a stacked tensor apart. What was changed is changed back as the blocks are unpacked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from offstage.stages.checkpoints.codecs.float_tiles import DTYPES, TILE_ELEMENTS, cast_values, elements_of
from offstage.stages.checkpoints.codecs.ggml_blocks import UNPACK
from offstage.stages.checkpoints.codecs.ggml_formats import FORMATS
from offstage.stages.checkpoints.codecs.ggml_on_device import UNPACK_ON_DEVICE
from offstage.stages.checkpoints.codecs.loops import Loop, Loops, loops
from offstage.stages.checkpoints.dtypes import torch_dtype
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.packed import BLOCK_BYTES, PackedBlock, PackedTensor
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.machine.aligned_memory import Bytes
from offstage.stages.units import DTYPE_BYTES

_SAMPLE_ROWS, _SAMPLE_COLUMNS = 512, 4096


@dataclass(frozen=True, slots=True)
class Arrangement:
    """How the rows that a file has lie in the tensor in use.

    ``swapped`` are sizes (a, b, c, d): the file has rows in the order a, b, c, d, the tensor in the order a, c, b, d.
    Those of a ``transposed`` tensor are its columns. ``less`` is taken off each value.
    """

    swapped: tuple[int, int, int, int] | None = None
    transposed: bool = False
    less: float = 0.0

    @property
    def keeps_rows(self) -> bool:
        """Whether a row of the tensor is a row of the file."""
        return self.swapped is None and not self.transposed


AS_THEY_ARE = Arrangement()
"""What most tensors have: rows in the model's own order, values as they are."""


@dataclass(frozen=True, slots=True)
class GgufCodec:
    """Unpacks tensors of a GGUF file.

    A part is rows of blocks of one of ``FORMATS``, an extent of ``uint8`` (rows, bytes a row) or, of plain values, one
    of their own dtype and of the tensor's shape; ``kinds`` has a name for each part. Where there are several, each has
    as many rows of every matrix of a stack: first come those of the first part.
    """

    kinds: tuple[str, ...]
    arrangement: Arrangement = AS_THEY_ARE

    @property
    def name(self) -> str:
        """The name of the first part's format."""
        return self.kinds[0]

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes that it unpacks to."""
        return DTYPES

    def blocks(self, tensor: PackedTensor) -> tuple[PackedBlock, ...]:
        """Return runs of rows, none of which goes from one matrix of a stack, or part, to the next.

        Rows are counted through all parts, one after the other.
        """
        return tuple(self._blocks(tensor))

    def _blocks(self, tensor: PackedTensor) -> Iterator[PackedBlock]:
        begin = 0
        for part, kind in zip(tensor.parts, self.kinds, strict=True):
            rows, width = _grid(part)
            row_bytes = int(_columns(part, kind) * DTYPE_BYTES[tensor.dtype])
            most = max(1, BLOCK_BYTES // max(1, row_bytes))
            run = rows // tensor.shape[0] if len(tensor.parts) > 1 else rows
            for at in _cuts(rows, run, most):
                span = part.as_bytes.span_of(at.start * width, at.stop * width)
                yield PackedBlock((span,), begin + at.start, begin + at.stop)
            begin += rows

    def unpack(self, tensor: PackedTensor, block: PackedBlock, data: Sequence[Bytes], target: Bytes) -> None:
        """Write the rows of ``block`` to their places in ``target``; takes some tiles of float32."""
        index, first = _part_of(tensor, block.begin)
        form, columns = FORMATS[self.kinds[index]], _columns(tensor.parts[index], self.kinds[index])
        count = block.end - block.begin
        packed = np.frombuffer(data[0], np.uint8).reshape(count, -1, form.bytes)
        loop = self.loop(tensor, block, data, target)
        if loop is not None:
            loop.run()
            return
        whole = elements_of(np.frombuffer(target, np.uint8), tensor.dtype)
        whole = whole.reshape(columns, -1).T if self.arrangement.transposed else whole.reshape(-1, columns)
        for rows, blocks in _tiles(count, columns // form.elements, form.elements):
            chosen = packed[rows, blocks].reshape(-1, form.bytes)
            values = np.empty((len(chosen), form.elements), np.float32)
            UNPACK[self.kinds[index]](chosen, values)
            if self.arrangement.less:
                values -= np.float32(self.arrangement.less)
            values = values.reshape(rows.stop - rows.start, -1)
            place = self._place(tensor, index, slice(first + rows.start, first + rows.stop))
            width = slice(blocks.start * form.elements, blocks.stop * form.elements)
            whole[place, width] = cast_values(values, tensor.dtype)

    def loop(self, tensor: PackedTensor, block: PackedBlock, data: Sequence[Bytes], target: Bytes) -> Loop | None:
        """Return what unpacks ``block`` at once, if there is such a loop."""
        index, first = _part_of(tensor, block.begin)
        kind, count = self.kinds[index], block.end - block.begin
        known = self._loops(kind, tensor.dtype)
        if known is None:
            return None
        packed = np.frombuffer(data[0], np.uint8).reshape(count, -1, FORMATS[kind].bytes)
        place = self._place(tensor, index, slice(first, first + count))
        made = target.reshape(-1, _columns(tensor.parts[index], kind) * int(DTYPE_BYTES[tensor.dtype]))
        made, places = (made[place], None) if isinstance(place, slice) else (made, place)
        return known.ggml(packed, made, kind=kind, dtype=tensor.dtype, places=places)

    def _loops(self, kind: str, dtype: str) -> Loops | None:
        """Return the loops, if there is one for ``kind`` and all that is to be changed back is the order of rows."""
        known = loops()
        if known is None or self.arrangement.transposed or self.arrangement.less:
            return None
        return known if known.can_unpack_ggml(kind, dtype) else None

    def _place(self, tensor: PackedTensor, index: int, rows: slice) -> slice | npt.NDArray[np.int64]:
        """Return which rows of the tensor in use those ``rows`` of the part ``index`` are."""
        if self.arrangement.swapped is not None:
            a, b, c, d = self.arrangement.swapped
            order = np.unravel_index(np.arange(rows.start, rows.stop), (a, b, c, d))
            return np.ravel_multi_index((order[0], order[2], order[1], order[3]), (a, c, b, d))
        if len(tensor.parts) == 1:
            return rows
        shares = [_grid(part)[0] // tensor.shape[0] for part in tensor.parts]
        matrix, within = divmod(rows.start, shares[index])
        begin = matrix * sum(shares) + sum(shares[:index]) + within
        return slice(begin, begin + rows.stop - rows.start)

    def tables(self, tensor: PackedTensor) -> tuple[torch.Tensor, ...]:
        """Return nothing: all is computed."""
        return ()

    def scratch_bytes(self, tensor: PackedTensor, block: PackedBlock) -> int:
        """Return what the values as float32, their codes, and where rows are swapped the values as used take."""
        index, _ = _part_of(tensor, block.begin)
        values = (block.end - block.begin) * _columns(tensor.parts[index], self.kinds[index])
        cast = int(DTYPE_BYTES[tensor.dtype]) if self.arrangement.swapped else 0
        return (8 + cast) * values + 32 * (block.end - block.begin)

    def unpack_on_device(
        self,
        tensor: PackedTensor,
        block: PackedBlock,
        data: Sequence[torch.Tensor],
        tables: Sequence[torch.Tensor],
        target: torch.Tensor,
    ) -> None:
        """Write the rows of ``block`` to their places in ``target``."""
        index, first = _part_of(tensor, block.begin)
        kind, count = self.kinds[index], block.end - block.begin
        form, columns = FORMATS[kind], _columns(tensor.parts[index], kind)
        shape = (count * columns // form.elements, form.elements)
        values = torch.empty(shape, dtype=torch.float32, device=target.device)
        UNPACK_ON_DEVICE[kind](data[0].view(-1, form.bytes), values)
        if self.arrangement.less:
            values -= self.arrangement.less
        values = values.view(count, columns)
        whole = target.view(torch_dtype(tensor.dtype))
        whole = whole.view(columns, -1).T if self.arrangement.transposed else whole.view(-1, columns)
        if self.arrangement.swapped is None:
            whole[self._place(tensor, index, slice(first, first + count))].copy_(values)
        else:
            order = torch.arange(first, first + count, device=target.device)
            whole.index_copy_(0, _swapped(order, self.arrangement.swapped), values.to(whole.dtype))

    def rows(self, tensor: PackedTensor, begin: int, end: int) -> PackedTensor | None:
        """Return rows ``begin`` to ``end`` of the first dimension, which each part has its share of."""
        if not self.arrangement.keeps_rows or any(_grid(part)[0] % tensor.shape[0] for part in tensor.parts):
            return None
        parts = tuple(_rows_of(part, tensor.shape[0], begin, end) for part in tensor.parts)
        return replace(tensor, parts=parts, shape=(end - begin, *tensor.shape[1:]))


def _swapped(rows: torch.Tensor, sizes: tuple[int, int, int, int]) -> torch.Tensor:
    """Return where ``rows`` in the order a, b, c, d are in the order a, c, b, d."""
    _, b, c, d = sizes
    within, inner, outer = rows % d, rows // d % c, rows // (c * d) % b
    return ((rows // (b * c * d) * c + inner) * b + outer) * d + within


def _grid(part: Extent) -> tuple[int, int]:
    """Return how many rows ``part`` has, and the bytes of one."""
    rows = math.prod(part.shape[:-1])
    return rows, part.bytes // max(1, rows)


def _columns(part: Extent, kind: str) -> int:
    """Return the values in a row of ``part``."""
    return _grid(part)[1] // FORMATS[kind].bytes * FORMATS[kind].elements


def _part_of(tensor: PackedTensor, row: int) -> tuple[int, int]:
    """Return in which part ``row`` lies, counted through all parts, and which row of that part it is."""
    ends = accumulate(_grid(part)[0] for part in tensor.parts)
    index, end = next((index, end) for index, end in enumerate(ends) if row < end)
    return index, row - end + _grid(tensor.parts[index])[0]


def _cuts(rows: int, run: int, most: int) -> Iterator[range]:
    """Yield ``rows`` in ranges of at most ``most``, none of which reaches over a multiple of ``run``."""
    for begin in range(0, rows, max(1, run)):
        for at in range(begin, begin + run, most):
            yield range(at, min(at + most, begin + run))


def _tiles(rows: int, blocks: int, elements: int) -> Iterator[tuple[slice, slice]]:
    """Yield which rows, and which blocks of each, are unpacked at once: many whole rows, or a piece of one."""
    most = max(1, TILE_ELEMENTS // elements)
    if blocks <= most:
        for row in range(0, rows, most // max(1, blocks)):
            yield slice(row, min(row + most // max(1, blocks), rows)), slice(0, blocks)
        return
    for row in range(rows):
        for block in range(0, blocks, most):
            yield slice(row, row + 1), slice(block, min(block + most, blocks))


def _rows_of(part: Extent, matrices: int, begin: int, end: int) -> Extent:
    """Return the rows of matrices ``begin`` to ``end`` of a part that has its rows of ``matrices``."""
    share = part.shape[0] // matrices
    each = part.bytes // matrices
    return replace(part, begin=part.begin + begin * each, shape=((end - begin) * share, *part.shape[1:]))


def sample(kind: str = "q4_k") -> tuple[PackedTensor, PackedBlock, list[Bytes]]:
    """Return a made-up tensor of the format ``kind``, one block and that block's data, to be unpacked by a probe."""
    form = FORMATS[kind]
    width = _SAMPLE_COLUMNS // form.elements * form.bytes
    file = ShardFile("sample", Path("sample"), _SAMPLE_ROWS * width, None, "")
    part = Extent(file, 0, "uint8", (_SAMPLE_ROWS, width))
    tensor = PackedTensor(GgufCodec((kind,)), (part,), "bfloat16", (_SAMPLE_ROWS, _SAMPLE_COLUMNS))
    (block,) = tensor.codec.blocks(tensor)
    return tensor, block, [np.resize(np.arange(1, 32, dtype=np.uint8), part.bytes)]
