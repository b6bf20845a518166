"""From storage to the host: parts are read straight into the memory in which the host computes with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stages.checkpoints.direct_file import cut
from stages.checkpoints.dtypes import torch_dtype
from stages.checkpoints.extents import Extent
from stages.dispatch.transfer.arena import Arena, HostMemory
from stages.dispatch.transfer.carrier import SMALL_BYTES, ChunkReader, Delivery, Traffic, reader_pool
from stages.dispatch.transfer.trace import Trace
from stages.machine.aligned_memory import ALIGNMENT, Bytes, align_down, align_up, private_bytes, tensor_in
from stages.machine.probes import CHUNK_BYTES

SMALL_ARENA_BYTES = 2**20
ALIGNED_TENSORS = 32
"""Tensors on their way at once that the staging memory has alignment to spare for."""


@dataclass(frozen=True, slots=True)
class _AlignedTensor:
    """One tensor of a part: its extent, and where the aligned read that brings it begins in the part's region."""

    extent: Extent
    begin: int

    def offset(self, place: int) -> int:
        """Return where in the region the byte goes that lies at ``place`` in the file."""
        return self.begin + place - align_down(self.extent.begin)


def place_part(extents: Sequence[Extent]) -> tuple[list[_AlignedTensor], int]:
    """Return where each of a part's tensors goes in its region, and how large the region must be."""
    places, size = [], 0
    for extent in extents:
        places.append(_AlignedTensor(extent, size))
        size += align_up(extent.end) - align_down(extent.begin)
    return places, size


class HostCarrier:
    """Brings parts that lie at the extents ``parts`` into staging memory of ``staging_bytes`` on the host."""

    def __init__(
        self, parts: Sequence[Sequence[Extent]], *, staging_bytes: int, traffic: Traffic, trace: Trace | None = None
    ) -> None:
        placed = [place_part(extents) for extents in parts]
        self._places = [places for places, _ in placed]
        self._chunks = [
            [(chunk, place.offset(chunk.offset)) for place in places for chunk in cut(place.extent, CHUNK_BYTES)]
            for places in self._places
        ]
        self.sizes = [size for _, size in placed]
        self.streamed = [sum(extent.bytes for extent in extents) for extents in parts]
        small = [size for size in self.sizes if size <= SMALL_BYTES]
        large = [size for size in self.sizes if size > SMALL_BYTES]
        slack = 2 * ALIGNMENT * min(sum(map(len, self._places)), ALIGNED_TENSORS)
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
            delivery.arriving.append(pool.submit(self._reader.read, chunk, data[begin : begin + chunk.length]))

    def wait(self, delivery: Delivery[Bytes]) -> None:
        """Wait for the reads."""
        for read in delivery.arriving:
            self._traffic.storage_bytes += read.result()

    def views(self, part: int, delivery: Delivery[Bytes]) -> list[torch.Tensor]:
        """Return the tensors of ``part``, in the order of its extents."""
        assert delivery.region is not None
        region = delivery.region
        return [
            tensor_in(region, place.offset(place.extent.begin), torch_dtype(place.extent.dtype), place.extent.shape)
            for place in self._places[part]
        ]

    def close(self) -> None:
        """Close the files; closing again does nothing."""
        self._reader.close()
