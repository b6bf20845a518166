"""From storage to the host: parts are read straight into the memory in which the host computes with them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stages.checkpoints.extents import Extent
from stages.dispatch.transfer.arena import Arena, HostMemory
from stages.dispatch.transfer.carrier import SMALL_BYTES, ChunkReader, Delivery, Traffic, reader_pool
from stages.dispatch.transfer.part_layout import lay_out_reads
from stages.dispatch.transfer.trace import Trace
from stages.machine.aligned_memory import ALIGNMENT, Bytes, align_up, private_bytes, tensor_in

SMALL_ARENA_BYTES = 2**20
ALIGNED_TENSORS = 32
"""Tensors on their way at once that the staging memory has alignment to spare for."""


class HostCarrier:
    """Brings parts that lie at the extents ``parts`` into staging memory of ``staging_bytes`` on the host."""

    def __init__(
        self, parts: Sequence[Sequence[Extent]], *, staging_bytes: int, traffic: Traffic, trace: Trace | None = None
    ) -> None:
        self._layouts = [lay_out_reads(extents) for extents in parts]
        self._chunks = [layout.chunks() for layout in self._layouts]
        self.sizes = [layout.size for layout in self._layouts]
        self.streamed = [layout.bytes for layout in self._layouts]
        small = [size for size in self.sizes if size <= SMALL_BYTES]
        large = [size for size in self.sizes if size > SMALL_BYTES]
        slack = 2 * ALIGNMENT * min(sum(map(len, parts)), ALIGNED_TENSORS)
        self._arena = Arena(HostMemory(min(staging_bytes + slack, sum(large))))
        self._small = Arena(HostMemory(min(SMALL_ARENA_BYTES, sum(small))))
        self._traffic = traffic
        self._reader = ChunkReader({extent.file for extents in parts for extent in extents}, trace)

    def take(self, part: int) -> Bytes | None:
        """Return memory for ``part``, or null if there is none free; small parts have an arena of their own."""
        size = self.sizes[part]
        return (self._small if size <= SMALL_BYTES else self._arena).take(size)

    def beyond(self, part: int) -> Bytes:
        """Return new memory for ``part``."""
        return private_bytes(align_up(self.sizes[part]))

    def bring(self, part: int, delivery: Delivery[Bytes]) -> None:
        """Start the reads that fill the region with ``part``."""
        assert delivery.region is not None
        pool, data = reader_pool(), delivery.region.data
        for chunk, begin in self._chunks[part]:
            target = data[begin - chunk.skipped :][: chunk.length]
            delivery.arriving.append(pool.submit(self._reader.read, chunk, target))

    def wait(self, delivery: Delivery[Bytes]) -> None:
        """Wait for the reads."""
        for read in delivery.arriving:
            self._traffic.storage_bytes += read.result()

    def views(self, part: int, delivery: Delivery[Bytes]) -> list[torch.Tensor]:
        """Return the tensors of ``part``, in the order of its extents."""
        assert delivery.region is not None
        region = delivery.region
        return [tensor_in(region, piece.begin, piece.dtype, piece.source.shape) for piece in self._layouts[part].pieces]

    def close(self) -> None:
        """Close the files; closing again does nothing."""
        self._reader.close()
