"""Bringing experts into slots: each row from its places in the checkpoint, or from the host over the link.

What is read passes through a few aligned buffers, since direct reads can't choose where a row begins; what waits on
the host is copied from where it waits. What rests packed is unpacked into a slot on the host, and by way of a buffer
into one on an accelerator. Copies follow all computing that was asked for before.
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
from stages.checkpoints.packed import AtRest, PackedBlock, PackedTensor, files_of, in_pieces, rest_bytes
from stages.dispatch.transfer.block_reader import BlockReader
from stages.dispatch.transfer.carrier import ChunkReader, Traffic, reader_pool
from stages.dispatch.transfer.host_link import HostLink
from stages.dispatch.transfer.link import Event, Link
from stages.dispatch.transfer.pinned_buffers import PinnedBuffers, SharedBuffer
from stages.dispatch.transfer.trace import STALL_SECONDS, Trace
from stages.machine.aligned_memory import align_up
from stages.machine.probes import CHUNK_BYTES, READERS
from stages.plan.predict import PINNED_BYTES

RowSource = tuple[AtRest, ...] | torch.Tensor
"""Where a row waits: in places on disk, one after the other, or on the host."""


@dataclass(slots=True)
class RowArrival:
    """An expert on its way into a slot: what is under way, and its bytes as they rest."""

    pieces: list[Future[tuple[int, Event, int]]] = field(default_factory=list)
    bytes: int = 0


class RowCarrier:
    """Brings rows over ``link``, each from one of ``sources``."""

    def __init__(
        self, link: Link, sources: Sequence[RowSource], *, traffic: Traffic, trace: Trace | None = None
    ) -> None:
        self._link, self._traffic, self._trace = link, traffic, trace
        places = [place for source in sources if isinstance(source, tuple) for place in source]
        self._reader = ChunkReader({file for place in places for file in files_of(place)}, trace)
        packed = [place for place in places if isinstance(place, PackedTensor)]
        self._unpacks_in_place = isinstance(link, HostLink)
        self._blocks = BlockReader(self._reader, packed)
        lengths = [c.length for place in places if isinstance(place, Extent) for c in cut(place, CHUNK_BYTES)]
        passed_on = () if self._unpacks_in_place else packed
        lengths += [align_up(piece.bytes) for tensor in passed_on for _, piece in in_pieces(tensor)]
        self._buffers = _buffers(link, max(lengths)) if lengths else None
        self._order, self._ordering = count(), threading.Lock()

    def bring(self, source: RowSource, target: torch.Tensor, arrival: RowArrival) -> None:
        """Start what fills ``target`` (the bytes of one row) from ``source``, as a part of ``arrival``."""
        arrival.bytes += target.nbytes if isinstance(source, torch.Tensor) else sum(map(rest_bytes, source))
        after = self._link.computed()
        if isinstance(source, torch.Tensor):
            done: Future[tuple[int, Event, int]] = Future()
            done.set_result(self._copy(source.detach().reshape(-1).view(torch.uint8), target, after, stored=0))
            arrival.pieces.append(done)
            return
        begin = 0
        for place in source:
            arrival.pieces += self._jobs(place, target[begin : begin + place.bytes], after)
            begin += place.bytes

    def _jobs(self, place: AtRest, target: torch.Tensor, after: Event) -> Iterator[Future[tuple[int, Event, int]]]:
        """Start what fills ``target`` with what lies at ``place``."""
        pool = reader_pool()
        if isinstance(place, Extent):
            for chunk in cut(place, CHUNK_BYTES):
                yield pool.submit(self._pass_on, chunk, target, chunk.begin - place.begin, after)
        elif self._unpacks_in_place:
            for block in place.codec.blocks(place):
                yield pool.submit(self._unpack, place, block, target)
        else:
            for begin, piece in in_pieces(place):
                yield from self._unpack_and_pass_on(piece, target[begin : begin + piece.bytes], after)

    def _unpack(self, tensor: PackedTensor, block: PackedBlock, target: torch.Tensor) -> tuple[int, Event, int]:
        """Read a block and unpack it to its place in ``target``; on the host there is nothing to follow."""
        return 0, None, self._blocks.bring(tensor, block, target.numpy())

    def _unpack_and_pass_on(
        self, tensor: PackedTensor, target: torch.Tensor, after: Event
    ) -> Iterator[Future[tuple[int, Event, int]]]:
        """Start what unpacks a tensor, or rows of one, in a buffer, and has that copied to ``target``."""
        assert self._buffers is not None
        blocks = tensor.codec.blocks(tensor)
        shared = SharedBuffer(self._buffers, len(blocks))

        def bring(block: PackedBlock) -> tuple[int, Event, int]:
            buffer, _ = shared.take()
            stored = self._blocks.bring(tensor, block, buffer.memory[: tensor.bytes])
            if not shared.fill():
                return -1, None, stored
            copied = self._copy(buffer.tensor[: tensor.bytes], target, after, stored=stored)
            buffer.copied = copied[1]
            return copied

        for block in blocks:
            job = reader_pool().submit(bring, block)
            shared.watch(job)
            yield job

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


def _buffers(link: Link, size: int) -> PinnedBuffers:
    """Return buffers of ``size`` bytes: one for each thread that reads, fewer where they are large."""
    return PinnedBuffers(link, count=max(1, min(READERS, PINNED_BYTES // size)), size=size)
