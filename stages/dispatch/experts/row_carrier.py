"""Bringing experts into slots: each row from its places in the checkpoint, or from the host over the link.

What is read passes through a few aligned buffers, since direct reads can't choose where a row begins; what waits on
the host is copied from where it waits. What rests packed is unpacked into a slot on the host; into one on an
accelerator by that itself, or by way of a buffer. Copies follow all computing that was asked for before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count

import torch

from offstage.stages.checkpoints.direct_file import Chunk, cut
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.packed import AtRest, PackedBlock, PackedTensor, files_of, in_pieces, rest_bytes
from offstage.stages.dispatch.transfer.block_reader import BlockReader
from offstage.stages.dispatch.transfer.carrier import ChunkReader, Traffic, reader_pool
from offstage.stages.dispatch.transfer.device_unpacker import DeviceUnpacker, Unpacking, crosses_packed
from offstage.stages.dispatch.transfer.host_link import HostLink
from offstage.stages.dispatch.transfer.link import Event, Link
from offstage.stages.dispatch.transfer.part_layout import read_lengths
from offstage.stages.dispatch.transfer.pinned_buffers import PinnedBuffers, SharedBuffer
from offstage.stages.dispatch.transfer.trace import STALL_SECONDS, Trace
from offstage.stages.machine.probes import CHUNK_BYTES, bounce_buffers
from offstage.stages.units import DeviceId

RowSource = tuple[AtRest, ...] | torch.Tensor
"""Where a row waits: in places on disk, one after the other, or on the host."""

Arrived = tuple[int, Event, int] | Unpacking
"""A copy by its place in the order of copies, when it is done, and the bytes that were read for it; or an unpacking."""


@dataclass(slots=True)
class RowArrival:
    """An expert on its way into a slot: what is under way, its bytes as they rest, and those that are carried there."""

    pieces: list[Future[Arrived]] = field(default_factory=list)
    bytes: int = 0
    carried: int = 0

    @property
    def has_begun(self) -> bool:
        """Whether something of it has been read, or is being."""
        return any(piece.running() or (piece.done() and not piece.cancelled()) for piece in self.pieces)

    @property
    def is_whole(self) -> bool:
        """Whether all of it is there."""
        return all(piece.done() and not piece.cancelled() and not piece.exception() for piece in self.pieces)

    @property
    def has_failed(self) -> bool:
        """Whether something of it could not be read."""
        return any(piece.done() and not piece.cancelled() and piece.exception() for piece in self.pieces)


def can_wait(source: RowSource) -> bool:
    """Return whether a row can be read after others: what rests packed is unpacked as it was asked for."""
    return isinstance(source, tuple) and all(isinstance(place, Extent) for place in source)


class RowCarrier:
    """Brings rows over ``link`` to ``device``, each from one of ``sources``."""

    def __init__(
        self,
        link: Link,
        sources: Sequence[RowSource],
        *,
        device: DeviceId,
        unpacker: DeviceUnpacker | None = None,
        traffic: Traffic,
        trace: Trace | None = None,
    ) -> None:
        self._link, self._device, self._traffic, self._trace = link, device, traffic, trace
        places = [place for source in sources if isinstance(source, tuple) for place in source]
        self._reader = ChunkReader({file for place in places for file in files_of(place)}, trace)
        packed = [place for place in places if isinstance(place, PackedTensor)]
        self._unpacks_in_place, self._unpacker = isinstance(link, HostLink), unpacker
        self._blocks = BlockReader(self._reader, [place for place in packed if not crosses_packed(place, unpacker)])
        passed_on = [place for place in places if isinstance(place, Extent) or not self._unpacks_in_place]
        lengths = read_lengths(passed_on, as_at_rest=unpacker is not None)
        self._buffers = _buffers(link, max(lengths)) if lengths else None
        self._order, self._ordering = count(), threading.Lock()

    def bring(self, source: RowSource, target: torch.Tensor, arrival: RowArrival, *, likely: bool = False) -> None:
        """Start what fills ``target`` (the bytes of one row) from ``source``, as a part of ``arrival``.

        What is only ``likely`` to be used, and is one that ``can_wait``, is read where nothing certain waits.
        """
        if isinstance(source, torch.Tensor):
            arrival.bytes += target.nbytes
            arrival.carried += target.nbytes
        else:
            arrival.bytes += sum(map(rest_bytes, source))
            arrival.carried += sum(
                rest_bytes(place) if self._unpacks_in_place or crosses_packed(place, self._unpacker) else place.bytes
                for place in source
            )
        after = self._link.computed()
        if isinstance(source, torch.Tensor):
            done: Future[Arrived] = Future()
            done.set_result(self._copy(source.detach().reshape(-1).view(torch.uint8), target, after, stored=0))
            arrival.pieces.append(done)
            return
        begin = 0
        for place in source:
            arrival.pieces += self._jobs(place, target[begin : begin + place.bytes], after, likely=likely)
            begin += place.bytes

    def _jobs(self, place: AtRest, target: torch.Tensor, after: Event, *, likely: bool) -> Iterator[Future[Arrived]]:
        """Start what fills ``target`` with what lies at ``place``."""
        pool = reader_pool()
        if isinstance(place, Extent):
            submit = pool.submit_likely if likely else pool.submit_awaited
            for chunk in cut(place, CHUNK_BYTES):
                yield submit(self._pass_on, chunk, target, chunk.begin - place.begin, after)
            return
        if self._unpacks_in_place or crosses_packed(place, self._unpacker):
            for block in place.codec.blocks(place):
                yield pool.submit_awaited(self._unpack, place, block, target, after)
            return
        for begin, piece in in_pieces(place):
            yield from self._unpack_and_pass_on(piece, target[begin : begin + piece.bytes], after)

    def _unpack(self, tensor: PackedTensor, block: PackedBlock, target: torch.Tensor, after: Event) -> Arrived:
        """Read a block and have it unpacked to its place in ``target``; on the host there is nothing to follow."""
        if self._unpacker is None:
            return 0, None, self._blocks.bring(tensor, block, target.numpy())
        return self._unpacker.bring(
            tensor, block, lambda: target, after=after, reader=self._reader, buffers=self._buffers
        )

    def _unpack_and_pass_on(
        self, tensor: PackedTensor, target: torch.Tensor, after: Event
    ) -> Iterator[Future[Arrived]]:
        """Start what unpacks a tensor, or rows of one, in a buffer, and has that copied to ``target``."""
        assert self._buffers is not None
        blocks = tensor.codec.blocks(tensor)
        shared = SharedBuffer(self._buffers, len(blocks))

        def bring(block: PackedBlock) -> Arrived:
            buffer, _ = shared.take()
            stored = self._blocks.bring(tensor, block, buffer.memory[: tensor.bytes])
            if not shared.fill():
                return -1, None, stored
            copied = self._copy(buffer.tensor[: tensor.bytes], target, after, stored=stored)
            buffer.note_copy(self._link, copied[1])
            return copied

        for block in blocks:
            job = reader_pool().submit_awaited(bring, block)
            shared.watch(job)
            yield job

    def _pass_on(self, chunk: Chunk, target: torch.Tensor, begin: int, after: Event) -> Arrived:
        """Read one chunk and have it copied to ``begin`` in ``target``; runs in a thread of the pool."""
        assert self._buffers is not None
        with self._buffers.lend() as (buffer, _):
            self._reader.read(chunk, buffer.memory.data[: chunk.length])
            source = buffer.tensor[chunk.skipped : chunk.wanted]
            copied = self._copy(source, target[begin : begin + len(source)], after, stored=chunk.wanted)
            buffer.note_copy(self._link, copied[1])
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
        waited = time.perf_counter() - began
        self._traffic.count_stall(self._device, waited)
        if self._trace is not None and waited > STALL_SECONDS:
            self._trace.add("stall: experts", "stall", began)
        for arrival in arrivals:
            self._traffic.count_use(self._device, at_rest=arrival.bytes, carried=arrival.carried)
        self._follow(found)

    def keep(self, arrivals: Sequence[RowArrival]) -> None:
        """Have computing follow ``arrivals``, which are whole, though nobody uses them yet."""
        self._follow([piece.result() for arrival in arrivals for piece in arrival.pieces])

    def _follow(self, found: Sequence[Arrived]) -> None:
        """Count what was read, and have computing follow the copies and unpackings."""
        there = [each for each in found if isinstance(each, Unpacking)]
        copied = [each for each in found if not isinstance(each, Unpacking)]
        self._traffic.storage_bytes += sum(each.stored_bytes for each in there) + sum(stored for _, _, stored in copied)
        if copied:
            self._link.follow(max(copied, key=lambda one: one[0])[1])
        if there:
            self._link.follow(max(there, key=lambda one: one.number).done)

    def make_certain(self, arrivals: Sequence[RowArrival]) -> None:
        """Have ``arrivals`` that were only likely to be used be read with all that is certain."""
        reader_pool().make_awaited([piece for arrival in arrivals for piece in arrival.pieces])

    def stop(self, arrivals: Sequence[RowArrival]) -> None:
        """Have nothing more of ``arrivals`` begin."""
        for arrival in arrivals:
            for piece in arrival.pieces:
                piece.cancel()

    def let_go(self, arrival: RowArrival) -> None:
        """Return once nothing of ``arrival``, which nobody waits for, is under way any more; what was read counts."""
        for piece in arrival.pieces:
            if not piece.cancel() and not piece.exception():  # whoever waited for one that failed was told
                found = piece.result()
                self._traffic.storage_bytes += found.stored_bytes if isinstance(found, Unpacking) else found[2]

    def close(self) -> None:
        """Wait for the device and close the files; closing again does nothing."""
        self._link.close()
        if self._buffers is not None:
            self._buffers.close()
        self._reader.close()


def _buffers(link: Link, size: int) -> PinnedBuffers:
    """Return buffers of ``size`` bytes: one for each thread that reads, fewer where they are large."""
    return PinnedBuffers(link, count=bounce_buffers(size), size=size)
