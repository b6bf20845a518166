"""Over the link: parts come from storage or from the host into staging memory of the accelerator, ahead of use.

What waits on the host is copied from where it waits, by order of the thread that runs the model, which never waits for
it. What waits on disk is read into pinned buffers, or unpacked there, and copied on by the thread that read it as soon
as it is there. What the accelerator can unpack crosses the link as it rests. Computing follows the copies of what it
uses; a copy follows all computing that was asked for before its region was taken, and so the last use of what was there
before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch

from offstage.stages.checkpoints.direct_file import Chunk
from offstage.stages.checkpoints.packed import PackedBlock, PackedTensor, files_of, in_pieces
from offstage.stages.dispatch.transfer.block_reader import BlockReader
from offstage.stages.dispatch.transfer.carrier import SMALL_BYTES, ChunkReader, Delivery, Traffic, reader_pool
from offstage.stages.dispatch.transfer.device_unpacker import DeviceUnpacker, Unpacking, crosses_packed
from offstage.stages.dispatch.transfer.link import Event, Link
from offstage.stages.dispatch.transfer.part_layout import PartLayout, PlacedPacked, Source, lay_out
from offstage.stages.dispatch.transfer.pinned_buffers import PinnedBuffers, SharedBuffer
from offstage.stages.dispatch.transfer.staging import Staging
from offstage.stages.dispatch.transfer.trace import Trace
from offstage.stages.machine.aligned_memory import align_up
from offstage.stages.plan.lasting_parts import place_lasting
from offstage.stages.units import DEVICE_ALIGNMENT


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A copy that was asked for: its place in the order of copies, when it is done, and what it took.

    Of several jobs that unpack what is copied at once, the last one has asked for it.
    """

    number: int
    done: Event
    copied_bytes: int
    stored_bytes: int = 0
    waited_seconds: float = 0.0


class LinkCarrier:
    """Brings ``parts`` over ``link``: each tensor from its place on disk, or from the host tensor given.

    The staging memory is as large as the largest part, or as ``staging_bytes`` if that is more, or as all parts if
    that is less. The memory of the host tensors is best pinned. Which parts a pass uses is certain, but for groups that
    are ``optional``; ``callers`` has the modules whose calls use each. What is read passes through ``buffers``,
    which other links may use too and whoever made them closes; they are null where nothing is. The same goes for
    ``unpacker``, by which the accelerator unpacks what it can; null where the host does.
    """

    def __init__(
        self,
        parts: Sequence[Sequence[Source]],
        link: Link,
        *,
        staging_bytes: int,
        buffers: PinnedBuffers | None,
        unpacker: DeviceUnpacker | None = None,
        traffic: Traffic,
        optional: Sequence[Sequence[int]] = (),
        callers: Mapping[int, Collection[str]] | None = None,
        trace: Trace | None = None,
    ) -> None:
        self._unpacker = unpacker
        self._link, self._traffic, self._trace = link, traffic, trace
        self._layouts = _lay_out_all(parts, callers or {}, link_room=staging_bytes)
        self.sizes = [layout.size for layout in self._layouts]
        self.streamed = [layout.rest_bytes for layout in self._layouts]
        self.carried = [
            sum(each.rest_bytes if crosses_packed(each.source, unpacker) else each.bytes for each in layout.pieces)
            for layout in self._layouts
        ]
        whole = sum(align_up(size, DEVICE_ALIGNMENT) for size in self.sizes)
        room = max(1, *self.sizes, min(staging_bytes, whole))
        self._staging: Staging[torch.Tensor] | None = Staging(
            link.memory,
            self.sizes,
            optional=optional,
            callers=callers or {},
            room=room,
            alignment=DEVICE_ALIGNMENT,
        )
        self._chunks = [layout.chunks() for layout in self._layouts]
        self._crossing = [
            [placed for placed in layout.packed if crosses_packed(placed.source, unpacker)] for layout in self._layouts
        ]
        self._pieces = [_unpacked_pieces(layout, unpacker) for layout in self._layouts]
        self._buffers = buffers
        self._order, self._ordering = count(), threading.Lock()
        self._watcher = ThreadPoolExecutor(1, thread_name_prefix="offstage-copy") if trace is not None else None
        packed = [piece for pieces in self._pieces for piece, _ in pieces]
        files = {chunk.file for chunks in self._chunks for chunk, _ in chunks}
        crossing = [placed.source for part in self._crossing for placed in part]
        self._reader = ChunkReader(files.union(*map(files_of, [*packed, *crossing])), trace)
        self._blocks = BlockReader(self._reader, packed)

    @property
    def kept(self) -> Collection[int]:
        """The optional parts, where they have memory of their own."""
        return self._staging.kept if self._staging is not None else ()

    def take(self, part: int, *, ahead: bool = False, anywhere: bool = False) -> torch.Tensor | None:
        """Return staging memory for ``part``, or null if there is none free."""
        assert self._staging is not None
        return self._staging.take(part, ahead=ahead, at_end=self.sizes[part] <= SMALL_BYTES, anywhere=anywhere)

    def beyond(self, part: int) -> torch.Tensor:
        """Return new memory for ``part``; a ``BudgetError`` where the accelerator is full."""
        size = max(1, self.sizes[part])
        return self._link.memory(size).lend(0, size)[0]

    def bring(self, part: int, delivery: Delivery[torch.Tensor]) -> None:
        """Ask for the copies of what waits on the host, and start the reads of what waits on disk."""
        after = self._link.computed()
        for piece in self._layouts[part].pieces:
            if isinstance(piece.source, torch.Tensor) and piece.bytes:
                arrival: Future[_Arrival] = Future()
                arrival.set_result(self._copy(piece.source, delivery, begin=piece.begin, after=after))
                delivery.arriving.append(arrival)
        pool = reader_pool()
        for chunk, begin in self._chunks[part]:
            delivery.arriving.append(pool.submit(self._pass_on, chunk, delivery, begin=begin, after=after))
        for packed, begin in self._pieces[part]:
            delivery.arriving += self._unpack(packed, delivery, begin=begin, after=after)
        for placed in self._crossing[part]:
            for block in placed.source.codec.blocks(placed.source):
                delivery.arriving.append(pool.submit(self._pass_on_packed, placed, block, delivery, after=after))

    def _pass_on(self, chunk: Chunk, delivery: Delivery[torch.Tensor], *, begin: int, after: Event) -> _Arrival:
        """Read one chunk and have it copied on to ``begin`` in the region; runs in a thread of the pool.

        The region is not touched before the read is there, so that the traceback of one that fails holds no memory.
        """
        assert self._buffers is not None
        with self._buffers.lend() as (buffer, waited):
            self._reader.read(chunk, buffer.memory.data[: chunk.length])
            source = buffer.tensor[chunk.skipped : chunk.wanted]
            arrival = self._copy(source, delivery, begin=begin, after=after)
            buffer.note_copy(self._link, arrival.done)
        return replace(arrival, stored_bytes=chunk.wanted, waited_seconds=waited)

    def _pass_on_packed(
        self, placed: PlacedPacked, block: PackedBlock, delivery: Delivery[torch.Tensor], *, after: Event
    ) -> Unpacking:
        """Read one block and have the accelerator unpack it to its place in the region."""
        assert self._unpacker is not None

        def target() -> torch.Tensor:
            assert delivery.region is not None
            return delivery.region[placed.begin : placed.begin + placed.bytes]

        began = time.perf_counter()
        unpacking = self._unpacker.bring(
            placed.source, block, target, after=after, reader=self._reader, buffers=self._buffers
        )
        if self._watcher is not None:
            self._watcher.submit(self._note, "unpack", began, unpacking)
        return unpacking

    def _unpack(
        self, tensor: PackedTensor, delivery: Delivery[torch.Tensor], *, begin: int, after: Event
    ) -> Iterator[Future[_Arrival]]:
        """Start what unpacks a tensor, or rows of one, and has it copied on to ``begin`` in the region."""
        assert self._buffers is not None
        blocks = tensor.codec.blocks(tensor)
        shared = SharedBuffer(self._buffers, len(blocks))

        def bring(block: PackedBlock) -> _Arrival:
            buffer, waited = shared.take()
            arrival = _Arrival(-1, None, 0, self._blocks.bring(tensor, block, buffer.memory[: tensor.bytes]), waited)
            if not shared.fill():
                return arrival
            copied = self._copy(buffer.tensor[: tensor.bytes], delivery, begin=begin, after=after)
            buffer.note_copy(self._link, copied.done)
            return replace(copied, stored_bytes=arrival.stored_bytes, waited_seconds=waited)

        for block in blocks:
            job = reader_pool().submit(bring, block)
            shared.watch(job)
            yield job

    def _copy(self, source: torch.Tensor, delivery: Delivery[torch.Tensor], *, begin: int, after: Event) -> _Arrival:
        """Ask for one copy. The lock makes the order of the numbers that of the copies."""
        assert delivery.region is not None
        data = source.view(-1).view(torch.uint8)
        target = delivery.region[begin : begin + data.nbytes]
        began = time.perf_counter()
        with self._ordering:
            arrival = _Arrival(next(self._order), self._link.copy(data, target, after=after), data.nbytes)
        if self._watcher is not None:
            self._watcher.submit(self._note, "copy", began, arrival)
        return arrival

    def _note(self, what: str, began: float, arrival: _Arrival | Unpacking) -> None:
        """Put a copy on the time line once it is done, or what was unpacked; runs in a thread of its own."""
        assert self._trace is not None
        self._link.finish(arrival.done)
        self._trace.add(what, "copy", began, bytes=arrival.copied_bytes)

    def abandon(self, arrived: Iterable[Future[Any]]) -> None:
        """Have computing follow what was asked for, and so all that is copied from now on into the same region."""
        self._follow(arrived)

    def wait(self, delivery: Delivery[torch.Tensor]) -> None:
        """Wait until reads are there and all is asked for, and have computing follow the last copy and unpacking."""
        self._follow(delivery.arriving)

    def _follow(self, arriving: Iterable[Future[Any]]) -> None:
        """Have computing follow ``arriving``; count what was read and copied, and how long reads waited."""
        arrivals: list[_Arrival | Unpacking] = [work.result() for work in arriving]
        for arrival in arrivals:
            self._traffic.storage_bytes += arrival.stored_bytes
            self._traffic.link_bytes += arrival.copied_bytes
            self._traffic.link_seconds += arrival.waited_seconds
        for kind in (_Arrival, Unpacking):
            asked = (arrival for arrival in arrivals if isinstance(arrival, kind) and arrival.number >= 0)
            last = max(asked, key=lambda arrival: arrival.number, default=None)
            if last is not None:
                self._link.follow(last.done)

    def views(self, part: int, delivery: Delivery[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors of ``part``, in the order of its sources."""
        assert delivery.region is not None
        return [piece.view(delivery.region) for piece in self._layouts[part].pieces]

    def start_anew(self) -> bool:
        """Return false: a link, and the threads that wait for it, are of the process that opened it."""
        return False

    def close(self) -> None:
        """Wait for the accelerator, free memory and close the files; closing again does nothing."""
        self._link.close()
        self._staging = None  # now, and not when the last thread that read has let go of the carrier
        if self._watcher is not None:
            self._watcher.shutdown()
        self._reader.close()


def _lay_out_all(
    parts: Sequence[Sequence[Source]], callers: Mapping[int, Collection[str]], *, link_room: int
) -> list[PartLayout]:
    """Return the layouts of ``parts``, as close as can be where what is there at once has no room otherwise."""
    layouts = [lay_out(sources, link_room=link_room) for sources in parts]
    sizes = {part: layout.size for part, layout in enumerate(layouts)}
    if place_lasting(callers, sizes, alignment=DEVICE_ALIGNMENT).least > link_room:
        return [lay_out(sources, link_room=0) for sources in parts]
    return layouts


def _unpacked_pieces(layout: PartLayout, unpacker: DeviceUnpacker | None) -> list[tuple[PackedTensor, int]]:
    """Return what the host unpacks of a part, piece by piece, and where each begins in the part's region."""
    return [
        (piece, placed.begin + begin)
        for placed in layout.packed
        if not crosses_packed(placed.source, unpacker)
        for begin, piece in in_pieces(placed.source)
    ]
