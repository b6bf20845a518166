"""Bringing experts into slots: each row from its places in the checkpoint, or from the host over the link.

What is read passes through a few aligned buffers, since direct reads can't choose where a row begins; what waits on
the host is copied from where it waits. Copies follow all computing that was asked for before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count

import torch

from stages.checkpoints.direct_file import Chunk, cut
from stages.checkpoints.extents import Extent
from stages.dispatch.transfer.carrier import ChunkReader, Traffic, reader_pool
from stages.dispatch.transfer.link import Event, Link
from stages.dispatch.transfer.pinned_buffers import PinnedBuffers
from stages.dispatch.transfer.trace import STALL_SECONDS, Trace
from stages.machine.probes import CHUNK_BYTES, READERS

RowSource = tuple[Extent, ...] | torch.Tensor
"""Where a row waits: in places on disk, one after the other, or on the host."""


@dataclass(slots=True)
class RowArrival:
    """An expert on its way into a slot: what is under way, and its bytes."""

    pieces: list[Future[tuple[int, Event, int]]] = field(default_factory=list)
    bytes: int = 0


class RowCarrier:
    """Brings rows over ``link``, each from one of ``sources``."""

    def __init__(
        self, link: Link, sources: Sequence[RowSource], *, traffic: Traffic, trace: Trace | None = None
    ) -> None:
        self._link, self._traffic, self._trace = link, traffic, trace
        extents = [extent for source in sources if isinstance(source, tuple) for extent in source]
        self._reader = ChunkReader({extent.file for extent in extents}, trace)
        longest = max((chunk.length for extent in extents for chunk in cut(extent, CHUNK_BYTES)), default=0)
        self._buffers = PinnedBuffers(link, count=READERS, size=longest) if longest else None
        self._order, self._ordering = count(), threading.Lock()

    def bring(self, source: RowSource, target: torch.Tensor, arrival: RowArrival) -> None:
        """Start what fills ``target`` (the bytes of one row) from ``source``, as a part of ``arrival``."""
        arrival.bytes += target.nbytes
        after = self._link.computed()
        if isinstance(source, torch.Tensor):
            done: Future[tuple[int, Event, int]] = Future()
            done.set_result(self._copy(source.detach().reshape(-1).view(torch.uint8), target, after, stored=0))
            arrival.pieces.append(done)
            return
        pool = reader_pool()
        for chunk, begin in _chunks(source):
            arrival.pieces.append(pool.submit(self._pass_on, chunk, target, begin, after))

    def _pass_on(self, chunk: Chunk, target: torch.Tensor, begin: int, after: Event) -> tuple[int, Event, int]:
        """Read one chunk and have it copied to ``begin`` in ``target``; runs in a thread of the pool."""
        assert self._buffers is not None
        with self._buffers.lend() as (buffer, _):
            self._reader.read(chunk, buffer.memory.data[: chunk.length])
            source = buffer.tensor[chunk.skipped : chunk.wanted]
            copied = self._copy(source, target[begin : begin + len(source)], after, stored=chunk.wanted)
            buffer.copied = copied[1]
        return copied

    def _copy(self, source: torch.Tensor, target: torch.Tensor, after: Event, *, stored: int) -> tuple[int, Event, int]:
        """Ask for one copy. The lock makes the order of the numbers that of the copies, where they are done later."""
        if after is None:
            return 0, self._link.copy(source, target, after=None), stored
        with self._ordering:
            return next(self._order), self._link.copy(source, target, after=after), stored

    def wait(self, arrivals: Sequence[RowArrival]) -> None:
        """Wait for all ``arrivals``, and have computing follow them. Raises what bringing one raised."""
        began = time.perf_counter()
        found = [piece.result() for arrival in arrivals for piece in arrival.pieces]
        self._traffic.stall_seconds += time.perf_counter() - began
        if self._trace is not None and time.perf_counter() - began > STALL_SECONDS:
            self._trace.add("stall: experts", "stall", began)
        self._traffic.storage_bytes += sum(stored for _, _, stored in found)
        self._traffic.streamed_bytes += sum(arrival.bytes for arrival in arrivals)
        if found:
            self._link.follow(max(found, key=lambda copied: copied[0])[1])

    def close(self) -> None:
        """Wait for the device and close the files; closing again does nothing."""
        self._link.close()
        if self._buffers is not None:
            self._buffers.close()
        self._reader.close()


def _chunks(places: Sequence[Extent]) -> Iterator[tuple[Chunk, int]]:
    """Yield the reads that bring a row, and where in the row the bytes of each begin."""
    begin = 0
    for extent in places:
        for chunk in cut(extent, CHUNK_BYTES):
            yield chunk, begin + chunk.begin - extent.begin
        begin += extent.bytes
