"""From storage to the host: parts are read straight into the memory in which the host computes with them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from stages.checkpoints.direct_file import Chunk
from stages.checkpoints.extents import Extent
from stages.dispatch.transfer.arena import Arena, HostMemory
from stages.dispatch.transfer.carrier import SMALL_BYTES, ChunkReader, Delivery, Traffic, reader_pool
from stages.dispatch.transfer.part_layout import lay_out_reads
from stages.dispatch.transfer.staging import Staging
from stages.dispatch.transfer.trace import Trace
from stages.machine.aligned_memory import ALIGNMENT, Bytes, align_up, private_bytes, tensor_in

SMALL_ARENA_BYTES = 2**20
ALIGNED_TENSORS = 32
"""Tensors on their way at once that the staging memory has alignment to spare for."""


class HostCarrier:
    """Brings parts that lie at the extents ``parts`` into staging memory of ``staging_bytes`` on the host.

    Which of them a pass uses is certain, but for groups that are ``optional``. The ``lasting`` ones are there while
    others come and go.
    """

    def __init__(
        self,
        parts: Sequence[Sequence[Extent]],
        *,
        staging_bytes: int,
        traffic: Traffic,
        optional: Sequence[Sequence[int]] = (),
        lasting: Collection[int] = (),
        trace: Trace | None = None,
    ) -> None:
        self._lasting = lasting
        self._layouts = [lay_out_reads(extents) for extents in parts]
        self._chunks = [layout.chunks() for layout in self._layouts]
        self.sizes = [layout.size for layout in self._layouts]
        self.streamed = [layout.bytes for layout in self._layouts]
        options = {part for group in optional for part in group}
        small = {part for part, size in enumerate(self.sizes) if size <= SMALL_BYTES and part not in options}
        large = [0 if part in small else size for part, size in enumerate(self.sizes)]
        room = staging_bytes + 2 * ALIGNMENT * min(sum(map(len, parts)), ALIGNED_TENSORS)
        self._staging = Staging(HostMemory, large, optional=optional, room=room, alignment=ALIGNMENT)
        self._small = Arena(HostMemory(min(SMALL_ARENA_BYTES, sum(self.sizes[part] for part in small))))
        self._small_parts = small
        self._traffic = traffic
        self._reader = ChunkReader({extent.file for extents in parts for extent in extents}, trace)

    @property
    def kept(self) -> Collection[int]:
        """The optional parts, where they have memory of their own."""
        return self._staging.kept

    def take(self, part: int, *, ahead: bool = False) -> Bytes | None:
        """Return memory for ``part``, or null if there is none free; small parts have an arena of their own."""
        if part in self._small_parts:
            return self._small.take(self.sizes[part])
        return self._staging.take(part, ahead=ahead, at_end=part in self._lasting)

    def beyond(self, part: int) -> Bytes:
        """Return new memory for ``part``."""
        return private_bytes(align_up(self.sizes[part]))

    def bring(self, part: int, delivery: Delivery[Bytes]) -> None:
        """Start the reads that fill the region with ``part``."""
        assert delivery.region is not None
        pool, data = reader_pool(), delivery.region.data
        for chunk, begin in self._chunks[part]:
            target = [data[begin - chunk.skipped :][: chunk.length]]
            read = pool.submit(self._read, chunk, target)
            read.add_done_callback(partial(_forget, target))
            delivery.arriving.append(read)

    def _read(self, chunk: Chunk, target: list[memoryview]) -> int:
        """Read ``chunk`` into what ``target`` holds. Once that is done nothing here holds the region any more."""
        return self._reader.read(chunk, target.pop())

    def count(self, arrived: Iterable[Future[Any]]) -> None:
        """Count what was read."""
        self._traffic.storage_bytes += sum(read.result() for read in arrived)

    def wait(self, delivery: Delivery[Bytes]) -> None:
        """Wait for the reads."""
        self.count(delivery.arriving)

    def views(self, part: int, delivery: Delivery[Bytes]) -> list[torch.Tensor]:
        """Return the tensors of ``part``, in the order of its extents."""
        assert delivery.region is not None
        region = delivery.region
        return [tensor_in(region, piece.begin, piece.dtype, piece.source.shape) for piece in self._layouts[part].pieces]

    def close(self) -> None:
        """Close the files; closing again does nothing."""
        self._reader.close()


def _forget(target: list[memoryview], _read: Future[int]) -> None:
    """Let go of the memory of a read that was cancelled, which goes on waiting in the queue of the pool."""
    target.clear()
