"""Where a tensor's bytes lie, and reading them from there: whole, or cut into aligned chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from stages.checkpoints.dtypes import torch_dtype
from stages.checkpoints.safetensors_header import Entry
from stages.checkpoints.shard_files import ShardFile, opened_shard, read_into
from stages.machine.aligned_memory import align_down, align_up


@dataclass(frozen=True, slots=True)
class Extent:
    """Where one tensor's bytes lie: ``file``, the offset ``begin`` in it, the dtype by name, the shape."""

    file: ShardFile
    begin: int
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, entry: Entry, file: ShardFile) -> Extent:
        """Return where the tensor lies that the header of ``file`` has as ``entry``."""
        return cls(file, entry.begin, entry.dtype, entry.shape)

    @property
    def bytes(self) -> int:
        """The size of the tensor."""
        return math.prod(self.shape) * torch_dtype(self.dtype).itemsize

    @property
    def end(self) -> int:
        """The offset of the first byte after the tensor's."""
        return self.begin + self.bytes


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of an extent that is read at once, from the aligned ``offset`` on: bytes ``begin`` to ``end`` of ``file``
    are the tensor's.
    """

    file: ShardFile
    offset: int
    begin: int
    end: int

    @property
    def skipped(self) -> int:
        """Bytes before the tensor's first, which are read since reads are aligned."""
        return self.begin - self.offset

    @property
    def wanted(self) -> int:
        """Bytes to read, up to the tensor's last."""
        return self.end - self.offset

    @property
    def length(self) -> int:
        """Bytes of memory that the read needs: ``wanted``, up to the next aligned offset."""
        return align_up(self.wanted)


def cut(extent: Extent, chunk_bytes: int) -> Iterator[Chunk]:
    """Yield the aligned reads, of ``chunk_bytes`` (aligned) at most, that bring ``extent``; none if it is empty."""
    for offset in range(align_down(extent.begin), extent.end if extent.bytes else 0, chunk_bytes):
        yield Chunk(extent.file, offset, max(extent.begin, offset), min(extent.end, offset + chunk_bytes))


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous cpu ``tensor`` as writable bytes."""
    flat = tensor.detach().view(-1) if tensor.dim() else tensor.detach().reshape(1)
    return flat.view(torch.uint8).numpy().data


def read_extent(extent: Extent) -> torch.Tensor:
    """Return the tensor that lies at ``extent``, on the cpu, in new memory."""
    tensor = torch.empty(extent.shape, dtype=torch_dtype(extent.dtype))
    fill_from(extent, tensor)
    return tensor


def fill_from(extent: Extent, tensor: torch.Tensor) -> None:
    """Read what lies at ``extent`` into ``tensor``: contiguous, on the cpu, of its dtype and shape."""
    if tensor.numel():
        with opened_shard(extent.file) as descriptor:
            read_into(descriptor, byte_view(tensor), offset=extent.begin, path=extent.file.path)
