"""Tensors that rest in fewer bytes than they are used in, and the seam of what unpacks them.

A packed tensor is some extents at rest, such as codes and their scales, and a codec. It is read and unpacked block by
block, each in the thread that read it, straight to where the tensor is used; so a whole tensor is never held twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.machine.aligned_memory import Bytes
from offstage.stages.units import tensor_bytes

if TYPE_CHECKING:
    from offstage.stages.checkpoints.codecs.loops import Loop
    from offstage.stages.machine.aligned_memory import Bytes

BLOCK_BYTES = 4 * 2**20
"""What a block unpacks to at most, unless one row of its tensor is more."""

SCRATCH_BYTES = 3 * 2**20
"""What unpacking a block may take at most beside what was read and what comes of it."""


@dataclass(frozen=True, slots=True)
class PackedBlock:
    """What is read and unpacked at once: byte ranges at rest (extents of ``uint8``), and ``begin`` to ``end`` of what
    the codec counts its blocks by, rows as a rule.

    The first range has the bulk; the others, such as scales, are small.
    """

    spans: tuple[Extent, ...]
    begin: int
    end: int

    @property
    def bytes(self) -> int:
        """The bytes at rest."""
        return sum(span.bytes for span in self.spans)


class Codec(Protocol):
    """How the bytes of one kind of packed tensor become the tensor in use. Frozen, compared by value."""

    @property
    def name(self) -> str:
        """What its rate is known by: ``fp8``, ``mxfp4``, ``q4_k``, ``zstd``."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes that it unpacks to."""

    def blocks(self, tensor: PackedTensor) -> tuple[PackedBlock, ...]:
        """Return the blocks of ``tensor``: together all of it, each on its own."""

    def unpack(self, tensor: PackedTensor, block: PackedBlock, data: Sequence[Bytes], target: Bytes) -> None:
        """Write what comes of ``block`` to its place in ``target``, the bytes of the whole tensor in use: by operators.

        ``data`` has the bytes of the block's spans. Several threads unpack blocks of one tensor at a time. Takes
        ``SCRATCH_BYTES`` at most; a ``CheckpointError`` names the file of bytes that can't be right.
        """

    def loop(self, tensor: PackedTensor, block: PackedBlock, data: Sequence[Bytes], target: Bytes) -> Loop | None:
        """Return what does the same in compiled code, where there is such a loop; ``data`` need not have been read."""

    def rows(self, tensor: PackedTensor, begin: int, end: int) -> PackedTensor | None:
        """Return rows ``begin`` to ``end`` of the tensor's first dimension as a tensor; null where they can't be read
        alone.
        """


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor of ``dtype`` and ``shape`` in use that rests packed: ``parts`` are its extents at rest.

    It takes the place of an ``Extent`` wherever a tensor on disk is brought from.
    """

    codec: Codec
    parts: tuple[Extent, ...]
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """The size of the tensor in use."""
        return tensor_bytes(self.shape, self.dtype)

    @property
    def rest_bytes(self) -> int:
        """The bytes at rest."""
        return sum(part.bytes for part in self.parts)

    @property
    def file(self) -> ShardFile:
        """The file of its bulk."""
        return self.parts[0].file

    @property
    def begin(self) -> int:
        """Where in that file its bulk begins."""
        return self.parts[0].begin


@dataclass(frozen=True, slots=True)
class MemoryFile(ShardFile):
    """A stretch of a shard that is in memory: its bytes from ``start`` on are ``data``, to be read only.

    A codec sees no difference: extents keep the offsets and the path that they have in the shard. ``memory`` is the
    whole piece of memory that the data are in: an accelerator copies from there by itself once all of it is pinned.
    """

    start: int = 0
    data: Bytes = field(default_factory=lambda: np.empty(0, np.uint8), compare=False, repr=False)
    memory: Bytes = field(default_factory=lambda: np.empty(0, np.uint8), compare=False, repr=False)

    def bytes_of(self, span: Extent) -> Bytes:
        """Return the bytes of ``span``, where they lie."""
        return self.data[span.begin - self.start : span.end - self.start]

    def tensor_of(self, span: Extent) -> torch.Tensor:
        """Return the bytes of ``span``, where they lie, as a tensor; it is to be read only too."""
        begin = self.bytes_of(span).ctypes.data - self.memory.ctypes.data
        return torch.from_numpy(self.memory[begin : begin + span.bytes])


def memory_file(part: Extent, data: Bytes, memory: Bytes | None = None) -> MemoryFile:
    """Return the stretch of the file of ``part`` that is ``part``, whose bytes are ``data``, in a larger ``memory``."""
    file_fields = {each.name: getattr(part.file, each.name) for each in fields(ShardFile)}
    view = data.view()
    view.flags.writeable = False
    return MemoryFile(**file_fields, start=part.begin, data=view, memory=data if memory is None else memory)


AtRest = Extent | PackedTensor
"""Where a tensor on disk is brought from."""


def rest_bytes(source: AtRest) -> int:
    """Return what ``source`` takes at rest, in bytes: what is read to bring it once."""
    return source.rest_bytes if isinstance(source, PackedTensor) else source.bytes


def files_of(source: AtRest) -> tuple[ShardFile, ...]:
    """Return the files that ``source`` is read from: none where it is in memory."""
    parts = source.parts if isinstance(source, PackedTensor) else (source,)
    return tuple(part.file for part in parts if not isinstance(part.file, MemoryFile))


def in_memory(tensor: PackedTensor, parts: Sequence[Bytes], memory: Bytes | None = None) -> PackedTensor:
    """Return ``tensor`` as one whose ``parts`` are in memory, each as its extent has it; all of them in ``memory``, or
    each in its own.
    """
    placed = zip(tensor.parts, parts, strict=True)
    return replace(tensor, parts=tuple(replace(part, file=memory_file(part, data, memory)) for part, data in placed))


def in_dtype(source: AtRest, dtype: str) -> AtRest | None:
    """Return ``source`` as what is brought from there in ``dtype``; null where it would have to be cast.

    A sole part that is the tensor in that dtype is brought as it is.
    """
    if isinstance(source, PackedTensor) and dtype in source.codec.dtypes:
        part = source.parts[0]
        if len(source.parts) == 1 and (part.dtype, part.shape) == (dtype, source.shape):
            return part
        return source if source.dtype == dtype else replace(source, dtype=dtype)
    return source if source.dtype == dtype else None


def rows_of(source: AtRest, begin: int, end: int) -> AtRest | None:
    """Return rows ``begin`` to ``end`` of the first dimension of ``source``; null where they can't be read alone."""
    return source.codec.rows(source, begin, end) if isinstance(source, PackedTensor) else source.rows(begin, end)


def in_pieces(tensor: PackedTensor) -> list[tuple[int, PackedTensor]]:
    """Return ``tensor`` as tensors one after the other, and where in its bytes in use each begins.

    They are rows of it, of ``BLOCK_BYTES`` together where so few can be read alone; else as few as can, or all.
    """
    count = tensor.shape[0] if tensor.shape else 1
    row_bytes = tensor.bytes // max(1, count)
    step = 1 << (max(1, BLOCK_BYTES // max(1, row_bytes)).bit_length() - 1)
    while step < count and tensor.codec.rows(tensor, step, min(2 * step, count)) is None:
        step *= 2
    pieces = [(begin, tensor.codec.rows(tensor, begin, min(begin + step, count))) for begin in range(0, count, step)]
    rows = [(begin * row_bytes, piece) for begin, piece in pieces if piece is not None]
    return rows if len(rows) == len(pieces) > 1 else [(0, tensor)]
