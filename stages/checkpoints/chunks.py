"""An extent cut into aligned chunks, as direct reads need them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stages.checkpoints.extents import Extent
from stages.checkpoints.shard_files import ShardFile
from stages.machine.aligned_memory import align_down, align_up


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
