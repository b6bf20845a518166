"""What brings weights: from storage or from the host into the memory where they compute, which is behind a link.

The host is a link that is in place: what is read or unpacked lands where it is used. For all others it passes through
buffers that the accelerator copies from by itself, by order of the thread that has read it; what waits on the host is
copied from where it waits, by order of the thread that runs the model, which never waits for it. What the accelerator
can unpack crosses the link as it rests. Computing follows the copies of what it uses; a copy follows all computing that
was asked for before its region was taken, and so the last use of what was there before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial

import torch

from offstage.stages.checkpoints.direct_file import Chunk, cut
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.open_files import untraced
from offstage.stages.checkpoints.packed import PackedBlock, PackedTensor, files_of, in_pieces
from offstage.stages.checkpoints.packed_reads import FileReader, ThreadBuffers, largest_at_rest
from offstage.stages.dispatch.transfer.device_unpacker import DeviceUnpacker, crosses_packed
from offstage.stages.dispatch.transfer.link import Event, Link, Moved
from offstage.stages.dispatch.transfer.part_layout import PartLayout, Source
from offstage.stages.dispatch.transfer.pinned_buffers import PinnedBuffers, SharedBuffer
from offstage.stages.dispatch.transfer.reading_threads import Urgency, reader_pool
from offstage.stages.dispatch.transfer.trace import STALL_SECONDS, Trace
from offstage.stages.dispatch.transfer.traffic import Traffic
from offstage.stages.machine.operator_threads import let_idle_teams_sleep
from offstage.stages.machine.probes import CHUNK_BYTES
from offstage.stages.units import CPU, DeviceId

_Job = tuple[Callable[[], Moved], SharedBuffer | None]
"""What a thread does, and the buffer that it shares with others that do so."""


@dataclass(slots=True, eq=False)
class Transfer:
    """Something on its way into a region, or there: the work of threads to fill it, and what was asked for at once.

    The region is null once it has been given up, so that work which was cancelled holds no memory. One that
    ``is_awaited`` a forward needs now: its copies go before those of all that is only on its way.
    """

    region: torch.Tensor | None
    is_awaited: bool = False
    work: list[Future[Moved]] = field(default_factory=list)
    asked: list[Moved] = field(default_factory=list)

    @property
    def has_failed(self) -> bool:
        """Whether something that was to fill it has failed."""
        return any(work.done() and not work.cancelled() and work.exception() for work in self.work)

    def arrive(self) -> list[Moved]:
        """Return what has brought it, once all is asked for: it is there. Raises what bringing it raised."""
        moves = [*self.asked, *(job.result() for job in self.work)] if self.work else self.asked
        self.asked, self.work = [], []
        return moves


class Mover:
    """Brings what lies at ``sources`` over ``link`` to ``device``, and counts in ``traffic`` what that costs.

    What is read, or unpacked on the host, passes through ``buffers`` on its way to where it can't be read in place;
    null where nothing is. Whoever made them closes them. The same goes for ``unpacker``, by which the accelerator
    unpacks what it can; null where the host does. The memory of host tensors is best pinned.
    """

    def __init__(
        self,
        link: Link,
        sources: Iterable[Source],
        *,
        device: DeviceId = CPU,
        buffers: PinnedBuffers | None = None,
        unpacker: DeviceUnpacker | None = None,
        traffic: Traffic,
        trace: Trace | None = None,
    ) -> None:
        self.link, self._buffers, self._unpacker = link, buffers, unpacker
        self.traffic, self._device, self._trace = traffic, device, trace
        on_disk = [source for source in sources if not isinstance(source, torch.Tensor)]
        packed = [place for place in on_disk if isinstance(place, PackedTensor) and not crosses_packed(place, unpacker)]
        pieces = packed if link.in_place else [piece for place in packed for _, piece in in_pieces(place)]
        files = {file for source in on_disk for file in files_of(source)}
        buffers_at_rest = ThreadBuffers(largest_at_rest(pieces))
        self._reader = FileReader(files, buffers_at_rest, traced=trace.span if trace else untraced)
        traces = trace is not None and not link.in_place
        self._watcher = ThreadPoolExecutor(1, thread_name_prefix="offstage-copy") if traces else None

    def fetch(self, layout: PartLayout, transfer: Transfer, *, urgency: Urgency = Urgency.CERTAIN) -> None:
        """Start what fills the region of ``transfer`` as ``layout`` says; threads read it as its ``urgency`` is.

        Whoever asks holds the transfer already, so that it can be given up if an interrupt ends this half-way.
        """
        after, waiting = self.link.computed(), list[tuple[torch.Tensor, int]]()
        for job, shared in self._jobs(layout, transfer, after):
            transfer.work.append(reader_pool().submit(job, urgency=urgency))
            if shared is not None:
                shared.watch(transfer.work[-1])
        for placed in layout.pieces:
            if placed.data is not None and placed.bytes:
                waiting.append((placed.data, placed.begin))
        if waiting:
            transfer.asked.append(self._copy(waiting, transfer, after))

    def _jobs(self, layout: PartLayout, transfer: Transfer, after: Event) -> Iterator[_Job]:
        """Yield what threads do to bring what waits on disk of ``layout``, each with the buffer that it shares."""
        for placed in layout.pieces:
            source, begin = placed.source, placed.begin
            if isinstance(source, Extent):
                read, shift = self._read if layout.reads_in_place else self._read_and_pass_on, begin - source.begin
                for chunk in cut(source, CHUNK_BYTES):
                    yield partial(read, chunk, transfer, shift + chunk.begin, after), None
            elif isinstance(source, PackedTensor) and placed.bytes:
                yield from self._packed_jobs(source, transfer, begin, after)

    def _packed_jobs(self, source: PackedTensor, transfer: Transfer, begin: int, after: Event) -> Iterator[_Job]:
        """Yield what brings ``source``, which rests packed, to ``begin`` in the region, block by block.

        That takes cores, which idle teams of operators leave to it from then on.
        """
        let_idle_teams_sleep()
        if self.link.in_place or crosses_packed(source, self._unpacker):
            bring = self._unpack if self.link.in_place else self._pass_on_packed
            for block in source.codec.blocks(source):
                yield partial(bring, source, block, transfer, begin, after), None
            return
        assert self._buffers is not None
        for place, piece in in_pieces(source):
            blocks = piece.codec.blocks(piece)
            shared = SharedBuffer(self._buffers, len(blocks))
            for block in blocks:
                yield partial(self._unpack_and_pass_on, piece, block, shared, transfer, begin + place, after), shared

    def _read(self, chunk: Chunk, transfer: Transfer, begin: int, _after: Event) -> Moved:
        """Read one chunk to where it is used. Once that is done nothing here holds the region any more."""
        self._reader.read(chunk, _bytes(transfer, begin - chunk.skipped, chunk.length).numpy().data)
        return Moved(stored_bytes=chunk.wanted)

    def _unpack(self, source: PackedTensor, block: PackedBlock, transfer: Transfer, begin: int, _after: Event) -> Moved:
        """Read a block and unpack it to where it is used."""
        target = _bytes(transfer, begin, source.bytes).numpy()
        return Moved(stored_bytes=self._reader.unpack(source, block, target))

    def _read_and_pass_on(self, chunk: Chunk, transfer: Transfer, begin: int, after: Event) -> Moved:
        """Read one chunk and have it copied on to ``begin`` in the region; runs in a thread of the pool.

        The region is not touched before the read is there, so that the traceback of one that fails holds no memory.
        """
        assert self._buffers is not None
        with self._buffers.lend() as buffer:
            self._reader.read(chunk, buffer.memory.data[: chunk.length])
            moved = self._copy([(buffer.tensor[chunk.skipped : chunk.wanted], begin)], transfer, after)
            buffer.note_copy(self.link, moved.done)
        return moved._replace(stored_bytes=chunk.wanted)

    def _pass_on_packed(
        self, source: PackedTensor, block: PackedBlock, transfer: Transfer, begin: int, after: Event
    ) -> Moved:
        """Read one block and have the accelerator unpack it to its place in the region."""
        assert self._unpacker is not None
        began = time.perf_counter()
        moved = self._unpacker.bring(
            source,
            block,
            lambda: _bytes(transfer, begin, source.bytes),
            after=after,
            files=self._reader,
            buffers=self._buffers,
        )
        self._watch("unpack", began, moved)
        return moved

    def _unpack_and_pass_on(
        self,
        tensor: PackedTensor,
        block: PackedBlock,
        shared: SharedBuffer,
        transfer: Transfer,
        begin: int,
        after: Event,
    ) -> Moved:
        """Read and unpack a block of ``tensor``, in a buffer that ``shared`` has for all of them.

        The last one has all of it copied on to ``begin`` in the region.
        """
        buffer = shared.take()
        stored = self._reader.unpack(tensor, block, buffer.memory[: tensor.bytes])
        moved = Moved()
        if shared.fill():
            moved = self._copy([(buffer.tensor[: tensor.bytes], begin)], transfer, after)
            buffer.note_copy(self.link, moved.done)
        return moved._replace(stored_bytes=stored)

    def _copy(self, data: Iterable[tuple[torch.Tensor, int]], transfer: Transfer, after: Event) -> Moved:
        """Ask for copies of ``data``, each to where it begins in the region."""
        pieces = [(source, _bytes(transfer, begin, source.nbytes)) for source, begin in data]
        size, began = sum(source.nbytes for source, _ in pieces), time.perf_counter()
        moved = Moved(self.link.copy(pieces, after=after, urgent=transfer.is_awaited), size)
        self._watch("copy", began, moved)
        return moved

    def _watch(self, what: str, began: float, moved: Moved) -> None:
        """Have a copy be on the time line once it is done, or what was unpacked."""
        if self._watcher is not None:
            self._watcher.submit(self._note, what, began, moved)

    def _note(self, what: str, began: float, moved: Moved) -> None:
        assert self._trace is not None
        self.link.finish(moved.done)
        self._trace.add(what, "copy", began, bytes=moved.copied_bytes)

    def wait(self, transfers: Iterable[Transfer], what: str) -> None:
        """Wait for ``what`` is needed now, and have computing follow it; the time that this takes is a stall."""
        began = time.perf_counter()
        moves = [moved for transfer in transfers for moved in transfer.arrive()]
        waited = time.perf_counter() - began
        self.traffic.count_stall(self._device, waited)
        if self._trace is not None and waited > STALL_SECONDS:
            self._trace.add(f"stall: {what}", "stall", began)
        self._follow(moves)

    def count_use(self, at_rest: int, carried: int) -> None:
        """Count one use of what has so many bytes as it rests, of which so many are ``carried``."""
        self.traffic.count_use(self._device, at_rest=at_rest, carried=carried)

    def bytes_of(self, layout: PartLayout) -> tuple[int, int]:
        """Return the bytes of ``layout`` as they rest, and as they come to where it computes: as they cross the link,
        or to the host as they rest.
        """
        return layout.rest_bytes, sum(
            each.rest_bytes if self.link.in_place or crosses_packed(each.source, self._unpacker) else each.bytes
            for each in layout.pieces
        )

    def _follow(self, moves: Sequence[Moved]) -> None:
        """Have computing follow all ``moves``; what was read and copied counts from then on."""
        for moved in moves:
            self.traffic.storage_bytes += moved.stored_bytes
            if not self.link.in_place:
                self.traffic.link_bytes += moved.copied_bytes
            if moved.done is not None:
                self.link.follow(moved.done)

    def abandon(self, transfer: Transfer) -> None:
        """Give up what is under way; its region is free once no thread fills it. Whoever waited for it was told.

        Computing follows what was asked for already, and so does all that comes into the same memory after it.
        """
        under_way = [work for work in transfer.work if not work.cancel()]
        wait(under_way)
        self._follow([*transfer.asked, *(work.result() for work in under_way if work.exception() is None)])
        transfer.region = None

    def start_anew(self) -> bool:
        """Go on in a process that was forked, where no thread fills what it lent; return whether it can.

        A link, and the threads that wait for it, are of the process that opened it.
        """
        if self.link.in_place:
            self._reader.start_anew()
        return self.link.in_place

    def close(self) -> None:
        """Wait for the accelerator and close the files; closing again does nothing."""
        self.link.close()
        if self._watcher is not None:
            self._watcher.shutdown()
        self._reader.close()


def _bytes(transfer: Transfer, begin: int, length: int) -> torch.Tensor:
    """Return a stretch of the region: only what still has it asks for that."""
    region = transfer.region
    assert region is not None
    return region if length == region.numel() else region[begin : begin + length]
