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
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from offstage.stages.checkpoints.codecs.ggml_blocks import UNPACK
from offstage.stages.checkpoints.codecs.ggml_formats import FORMATS
from offstage.stages.checkpoints.codecs.loops import Loop, Loops, loops
from offstage.stages.checkpoints.device_codec import DeviceCodec, most_at_once, tiles
from offstage.stages.checkpoints.dtypes import torch_dtype
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.packed import BLOCK_BYTES, PackedBlock, PackedTensor
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.machine.aligned_memory import Bytes
from offstage.stages.units import DTYPE_BYTES

NAMES = tuple(FORMATS)
"""What rates of them are known by."""
DTYPES = ("float32", "bfloat16", "float16")
"""What float32 values can be written as."""

_SAMPLE_ROWS, _SAMPLE_COLUMNS = 512, 4096
_LOOKED_UP = 2**14
"""How many values the ``gguf`` package unpacks at once: what it looks them up by takes dozens of bytes for each."""


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
class GgufCodec(DeviceCodec):
    """Unpacks tensors of a GGUF file.

    A part is rows of blocks of one of ``FORMATS``, an extent of ``uint8`` (rows, bytes a row), of a stack (matrices,
    rows, bytes a row), or, of plain values, one of their own dtype and of the tensor's shape; ``kinds`` has a name for
    each part. Where there are several, each has as many rows of every matrix of a stack: first come those of the first
    part.
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

    @property
    def portable(self) -> bool:
        """Whether torch has operators for all formats."""
        return all(kind in UNPACK for kind in self.kinds)

    def blocks(self, tensor: PackedTensor) -> tuple[PackedBlock, ...]:
        """Return runs of rows, none of which goes from one matrix of a stack, or part, to the next.

        Rows are counted through all parts, one after the other.
        """
        ends = accumulate(_grid(part)[0] for part in tensor.parts)
        blocks: list[PackedBlock] = []
        for part, kind, end in zip(tensor.parts, self.kinds, ends, strict=True):
            rows = _grid(part)[0]
            row_bytes = int(_columns(part, kind) * DTYPE_BYTES[tensor.dtype])
            run = rows // tensor.shape[0] if len(tensor.parts) > 1 else rows
            for cut in _cuts(range(end - rows, end), max(1, run), max(1, BLOCK_BYTES // max(1, row_bytes))):
                blocks.append(self._block(tensor, cut))
        return tuple(blocks)

    def _block(self, tensor: PackedTensor, rows: range) -> PackedBlock:
        index, first = _part_of(tensor, rows.start)
        width = _grid(tensor.parts[index])[1]
        span = tensor.parts[index].as_bytes.span_of(first * width, (first + len(rows)) * width)
        return PackedBlock((span,), rows.start, rows.stop)

    def loop(self, tensor: PackedTensor, block: PackedBlock, data: Sequence[Bytes], target: Bytes) -> Loop | None:
        """Return what unpacks ``block`` at once, if there is such a loop."""
        index, first = _part_of(tensor, block.begin)
        kind, count = self.kinds[index], block.end - block.begin
        compiled = self._loops(kind, tensor.dtype)
        if compiled is None:
            return None
        packed = np.frombuffer(data[0], np.uint8).reshape(count, -1, FORMATS[kind].bytes)
        rows_target = target.reshape(-1, _columns(tensor.parts[index], kind) * int(DTYPE_BYTES[tensor.dtype]))
        places = None
        if self.arrangement.swapped is None:
            rows_target = rows_target[self._place(tensor, index, first, count)]
        else:
            places = swapped_places(np.arange(first, first + count), self.arrangement.swapped)
        return compiled.ggml(packed, rows_target, kind=kind, dtype=tensor.dtype, places=places)

    def _loops(self, kind: str, dtype: str) -> Loops | None:
        """Return the loops, if there is one for ``kind`` and all that is to be changed back is the order of rows."""
        compiled = loops()
        if compiled is None or self.arrangement.transposed or self.arrangement.less:
            return None
        return compiled if compiled.can_unpack_ggml(kind, dtype) else None

    def _place(self, tensor: PackedTensor, index: int, first: int, count: int) -> slice:
        """Return which rows of the tensor in use those are that begin at ``first`` in the part ``index``."""
        if len(tensor.parts) == 1:
            return slice(first, first + count)
        shares = [_grid(part)[0] // tensor.shape[0] for part in tensor.parts]
        matrix, within = divmod(first, shares[index])
        begin = matrix * sum(shares) + sum(shares[:index]) + within
        return slice(begin, begin + count)

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
        packed = data[0].view(count, -1, form.bytes)
        whole = target.view(torch_dtype(tensor.dtype))
        whole = whole.view(columns, -1).T if self.arrangement.transposed else whole.view(-1, columns)
        place: slice | torch.Tensor
        if self.arrangement.swapped is None:
            place = self._place(tensor, index, first, count)
        else:
            place = swapped_places(torch.arange(first, first + count, device=target.device), self.arrangement.swapped)
        most = min(most_at_once(target) if kind in UNPACK else _LOOKED_UP, count * columns)
        room = torch.empty(most, dtype=torch.float32, device=target.device)
        for some, part in tiles(count, columns, most=most, height=1, width=256):
            blocks = packed[some, part.start // form.elements : part.stop // form.elements].reshape(-1, form.bytes)
            values = _values(kind, blocks, room).view(some.stop - some.start, -1)
            if self.arrangement.less:
                values -= self.arrangement.less
            if isinstance(place, slice):
                whole[place][some, part].copy_(values)
            else:
                whole[:, part].index_copy_(0, place[some], values.to(whole.dtype))

    def rows(self, tensor: PackedTensor, begin: int, end: int) -> PackedTensor | None:
        """Return rows ``begin`` to ``end`` of the first dimension, which each part has its share of."""
        if not self.arrangement.keeps_rows or any(_grid(part)[0] % tensor.shape[0] for part in tensor.parts):
            return None
        parts = tuple(_rows_of(part, tensor.shape[0], begin, end) for part in tensor.parts)
        return replace(tensor, parts=parts, shape=(end - begin, *tensor.shape[1:]))


Rows = TypeVar("Rows", torch.Tensor, npt.NDArray[np.int64])


def swapped_places(rows: Rows, sizes: tuple[int, int, int, int]) -> Rows:
    """Return where ``rows`` in the order a, b, c, d are in the order a, c, b, d."""
    _, b, c, d = sizes
    within, inner, outer = rows % d, rows // d % c, rows // (c * d) % b
    return ((rows // (b * c * d) * c + inner) * b + outer) * d + within


def _values(kind: str, blocks: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of ``blocks`` (n, bytes): made by torch in ``room``, or by the format's package."""
    if kind in UNPACK:
        values = room[: len(blocks) * FORMATS[kind].elements].view(len(blocks), -1)
        UNPACK[kind](blocks, values)
        return values
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):
        array = dequantize(blocks.numpy().reshape(1, -1), GGMLQuantizationType[kind.upper()])
    return torch.from_numpy(array)


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


def _cuts(rows: range, run: int, most: int) -> Iterator[range]:
    """Yield ``rows`` in ranges of at most ``most``, none of which reaches over a multiple of ``run`` from the first."""
    for begin in range(rows.start, rows.stop, run):
        stop = min(begin + run, rows.stop)
        for at in range(begin, stop, most):
            yield range(at, min(at + most, stop))


def _rows_of(part: Extent, matrices: int, begin: int, end: int) -> Extent:
    """Return the rows of matrices ``begin`` to ``end`` of a part that has its rows of ``matrices``."""
    share = part.shape[0] // matrices
    each = part.bytes // matrices
    return replace(part, begin=part.begin + begin * each, shape=((end - begin) * share, *part.shape[1:]))


def sample(kind: str = "q4_k") -> tuple[PackedTensor, PackedBlock, list[Bytes]]:
    """Return a made-up tensor of one block of the format ``kind``, that block and its data: what a probe unpacks."""
    form = FORMATS[kind]
    width = _SAMPLE_COLUMNS // form.elements * form.bytes
    file = ShardFile("sample", Path("sample"), _SAMPLE_ROWS * width, None, "")
    part = Extent(file, 0, "uint8", (_SAMPLE_ROWS, width))
    tensor = PackedTensor(GgufCodec((kind,)), (part,), "bfloat16", (_SAMPLE_ROWS, _SAMPLE_COLUMNS))
    block = next(iter(tensor.codec.blocks(tensor)))
    return tensor, block, [np.resize(np.arange(1, 32, dtype=np.uint8), part.bytes)]
