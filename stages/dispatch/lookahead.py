"""Reading ahead: the weights of the next parts come from storage while the current one computes.

A part is what streams together: the tensors that one module holds directly. All decisions are made in the thread that
runs the model, when it takes a part or lets one go; the pool's threads do nothing but read. So there is no lock, and an
error of a read surfaces in the forward that needed it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import torch

from stages.dispatch.arena import Arena, Bytes
from stages.dispatch.schedule import Schedule
from stages.dispatch.trace import Trace
from stages.shard_load.direct import DirectFile
from stages.shard_load.files import ShardFile
from stages.shard_load.memory import ALIGNMENT, align_down, align_up, private_memory
from stages.shard_load.reading import Extent, torch_dtype

READERS = 4
CHUNK_BYTES = 2 * 2**20
SMALL_BYTES = 64 * 2**10
SMALL_ARENA_BYTES = 2**20
ALIGNED_TENSORS = 32
"""Tensors on their way at once that the staging memory has alignment to spare for."""
STALL_SECONDS = 1e-4
"""Shorter waits are no stalls in a trace: taking a result takes that long."""


@functools.cache
def reader_pool() -> ThreadPoolExecutor:
    """Return the process's pool of reading threads; it is started by the first read and ends with the process."""
    return ThreadPoolExecutor(READERS, thread_name_prefix="offstage-read")


@dataclass(slots=True)
class Traffic:
    """What streaming has cost so far.

    ``streamed_bytes`` were brought to where they compute, ``storage_bytes`` of them read from storage for it;
    forwards waited ``stall_seconds``; ``overflow_bytes`` is the most that lay outside the staging memory at once.
    """

    streamed_bytes: int = 0
    storage_bytes: int = 0
    stall_seconds: float = 0.0
    overflow_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Place:
    """One tensor of a part: its extent, and where the aligned read that brings it begins in the part's region."""

    extent: Extent
    begin: int

    @property
    def skipped(self) -> int:
        """Bytes read before the tensor's first, since reads are aligned."""
        return self.extent.begin - align_down(self.extent.begin)


@dataclass(slots=True)
class _Delivery:
    """A part on its way, or there: its region, the reads that fill it, and the calls that use it."""

    region: Bytes
    reads: list[Future[int]] = field(default_factory=list)
    users: int = 0
    overflow: bool = False


def place_part(extents: Sequence[Extent]) -> tuple[list[_Place], int]:
    """Return where each of a part's tensors goes in its region, and how large the region must be."""
    places, size = [], 0
    for extent in extents:
        places.append(_Place(extent, size))
        size += align_up(extent.end) - align_down(extent.begin)
    return places, size


class Lookahead:
    """Delivers parts by number, in staging memory of ``staging_bytes``, reading ahead in ``order``."""

    def __init__(
        self,
        parts: Sequence[Sequence[Extent]],
        order: Sequence[int],
        *,
        staging_bytes: int,
        traffic: Traffic,
        trace: Trace | None = None,
    ) -> None:
        placed = [place_part(extents) for extents in parts]
        self._places = [places for places, _ in placed]
        self._sizes = [size for _, size in placed]
        self._bytes = [sum(extent.end - extent.begin for extent in extents) for extents in parts]
        small = [size for size in self._sizes if size <= SMALL_BYTES]
        large = [size for size in self._sizes if size > SMALL_BYTES]
        slack = 2 * ALIGNMENT * min(sum(map(len, self._places)), ALIGNED_TENSORS)
        self._arena = Arena(min(staging_bytes + slack, sum(large)))
        self._small = Arena(min(SMALL_ARENA_BYTES, sum(small)))
        self._schedule = Schedule(order)
        self._deliveries: dict[int, _Delivery] = {}
        self._traffic, self._trace = traffic, trace
        files = {extent.file for extents in parts for extent in extents}
        self._files: Mapping[ShardFile, DirectFile] = {file: DirectFile(file) for file in files}

    def take(self, part: int) -> list[torch.Tensor]:
        """Return the tensors of ``part``, in the order of its extents; waits for them if it must.

        They are views of the staging memory, to be given back with ``let_go``. Raises what reading them raised.
        """
        self._schedule.play(part)
        delivery = self._deliveries.get(part) or self._on_demand(part)
        delivery.users += 1
        self._ask_ahead()
        self._wait_for(part, delivery)
        self._traffic.streamed_bytes += self._bytes[part]
        return [_view(delivery.region, place) for place in self._places[part]]

    def let_go(self, part: int) -> None:
        """Give ``part`` back: its memory is free once nothing views it, unless its next use was asked for already."""
        delivery = self._deliveries[part]
        delivery.users -= 1
        if not delivery.users and (delivery.overflow or not self._schedule.wanted(part)):
            del self._deliveries[part]
        del delivery
        self._ask_ahead()

    def begin_pass(self) -> None:
        """Say that the model's forward begins."""
        self._schedule.begin_pass()
        self._forget_unwanted()
        self._ask_ahead()

    def end_pass(self) -> None:
        """Say that the model's forward has ended well: its parts are expected in the order in which it took them."""
        if self._schedule.end_pass():
            self._ask_ahead()
            self._forget_unwanted()
            self._ask_ahead()

    def close(self) -> None:
        """Wait for the reads under way and close the files; closing again does nothing."""
        for part in list(self._deliveries):
            self._drop(part)
        for file in self._files.values():
            file.close()
        self._files = {}

    def _ask_ahead(self) -> None:
        """Ask for what comes next, as far as the staging memory has room."""
        for part in self._schedule.upcoming():
            if part not in self._deliveries:
                region = self._take(part)
                if region is None:
                    return
                self._ask(part, region)

    def _take(self, part: int) -> Bytes | None:
        """Return memory for ``part``, or null if there is none free.

        A norm's few KB have memory of their own: between two large regions they would cost the room for one.
        """
        size = self._sizes[part]
        return (self._small if size <= SMALL_BYTES else self._arena).take(size)

    def _ask(self, part: int, region: Bytes, *, overflow: bool = False) -> _Delivery:
        """Start the reads that fill ``region`` with ``part``."""
        delivery = self._deliveries[part] = _Delivery(region, overflow=overflow)
        pool, data = reader_pool(), region.data
        for place in self._places[part]:
            first, last = align_down(place.extent.begin), place.extent.end
            for offset in range(first, last, CHUNK_BYTES):
                begin = place.begin + offset - first
                length = min(CHUNK_BYTES, align_up(last) - offset)
                read = pool.submit(
                    self._read,
                    self._files[place.extent.file],
                    data[begin : begin + length],
                    offset=offset,
                    wanted=min(length, last - offset),
                )
                delivery.reads.append(read)
        return delivery

    def _read(self, file: DirectFile, target: memoryview, *, offset: int, wanted: int) -> int:
        """Read one chunk; runs in a thread of the pool."""
        file.check()
        if self._trace is None:
            return file.read(target, offset=offset, wanted=wanted)
        with self._trace.span("read", "read", bytes=wanted, offset=offset):
            return file.read(target, offset=offset, wanted=wanted)

    def _wait_for(self, part: int, delivery: _Delivery) -> None:
        """Wait until ``delivery`` is there. One that failed is given up, so that a later use reads it again."""
        began = time.perf_counter()
        with ExitStack() as undo:
            undo.callback(self._drop, part)
            for read in delivery.reads:
                self._traffic.storage_bytes += read.result()
            undo.pop_all()
        delivery.reads.clear()
        self._traffic.stall_seconds += time.perf_counter() - began
        if self._trace is not None and time.perf_counter() - began > STALL_SECONDS:
            self._trace.add(f"stall: part {part}", "stall", began)

    def _on_demand(self, part: int) -> _Delivery:
        """Ask for ``part`` now. What was read ahead makes room for it, the last first; failing that, new memory."""
        region = self._take(part)
        idle = [other for other, delivery in self._deliveries.items() if not delivery.users]
        if region is None and idle:
            self._schedule.ask_again()
        while region is None and idle:
            self._drop(idle.pop())
            region = self._take(part)
        if region is not None:
            return self._ask(part, region)
        outside = sum(self._sizes[other] for other, delivery in self._deliveries.items() if delivery.overflow)
        size = align_up(max(self._sizes[part], 1))
        self._traffic.overflow_bytes = max(self._traffic.overflow_bytes, outside + size)
        return self._ask(part, np.frombuffer(private_memory(size), np.uint8), overflow=True)

    def _drop(self, part: int) -> None:
        """Give ``part`` up; its region is free once no thread reads into it."""
        delivery = self._deliveries.pop(part)
        wait([read for read in delivery.reads if not read.cancel()])

    def _forget_unwanted(self) -> None:
        """Give up what was read ahead and is not expected any more."""
        for part in [part for part, delivery in self._deliveries.items() if not delivery.users]:
            if not self._schedule.wanted(part):
                self._drop(part)


def _view(region: Bytes, place: _Place) -> torch.Tensor:
    """Return the tensor at ``place`` as a view of ``region``; a copy where its address isn't aligned."""
    extent = place.extent
    dtype = torch_dtype(extent.dtype)
    count = (extent.end - extent.begin) // dtype.itemsize
    offset = place.begin + place.skipped
    if count == 0:
        return torch.empty(extent.shape, dtype=dtype)
    if offset % dtype.itemsize:
        raw = torch.frombuffer(region, dtype=torch.uint8, count=count * dtype.itemsize, offset=offset)
        return raw.clone().view(dtype).view(extent.shape)
    return torch.frombuffer(region, dtype=dtype, count=count, offset=offset).view(extent.shape)
