"""What brings a part: from storage to the host, or over the link to an accelerator."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol

import torch

from offstage.stages.checkpoints.direct_file import Chunk, DirectFile
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.packed_reads import BlockAtOnce, SpanRead
from offstage.stages.checkpoints.shard_files import ShardFile, read_into
from offstage.stages.dispatch.transfer.arena import Region
from offstage.stages.dispatch.transfer.reading_threads import ReadingThreads
from offstage.stages.dispatch.transfer.trace import Trace
from offstage.stages.machine.aligned_memory import Bytes
from offstage.stages.machine.operator_threads import let_idle_teams_sleep
from offstage.stages.machine.probes import READING_THREADS
from offstage.stages.units import DeviceId

SMALL_BYTES = 64 * 2**10
"""A norm's few KB are kept out of the way of large parts: between two of their regions they would cost room for one."""


@functools.cache
def reader_pool() -> ReadingThreads:
    """Return the process's pool of reading threads; it is started by the first read and ends with the process.

    On the host they read, and unpack, on the cores that compute.
    """
    let_idle_teams_sleep()
    return ReadingThreads(READING_THREADS)


os.register_at_fork(after_in_child=reader_pool.cache_clear)  # its threads aren't there


class ChunkReader:
    """The ``files`` of some parts, held open to be read chunk by chunk, in any thread."""

    def __init__(self, files: Iterable[ShardFile], trace: Trace | None) -> None:
        self._files = {file: DirectFile(file) for file in files}
        self._trace = trace

    def read(self, chunk: Chunk, target: memoryview) -> int:
        """Read ``chunk`` into ``target`` (aligned, ``chunk.length`` bytes), if its file is what it was; return how many
        bytes were wanted.
        """
        file = self._files[chunk.file]
        file.check()
        with (
            self._trace.span("read", "read", bytes=chunk.wanted, offset=chunk.offset) if self._trace else nullcontext()
        ):
            return file.read(target, offset=chunk.offset, wanted=chunk.wanted)

    def read_small(self, span: Extent, target: memoryview) -> None:
        """Fill ``target`` with the bytes at ``span``, through the page cache, if its file is what it was."""
        file = self._files[span.file]
        file.check()
        read_into(file.descriptor, target, offset=span.begin, path=span.file.path)

    def descriptor(self, read: SpanRead) -> int | None:
        """Return what the file of ``read`` is open as; null where it can't be read directly as it should."""
        file = self._files[read.span.file]
        return file.descriptor if read.chunk is None else file.direct_descriptor

    def bring_at_once(self, block: BlockAtOnce, buffer: Bytes, target: Bytes) -> bool:
        """Read ``block`` into ``buffer`` and unpack it to ``target``, if its files are what they were; return false
        where a read failed.
        """
        for file in block.files:
            self._files[file].check()
        with self._trace.span("read and unpack", "read", bytes=block.bytes) if self._trace else nullcontext():
            return block.run(buffer, target)

    def close(self) -> None:
        """Close the files; closing again does nothing."""
        for file in self._files.values():
            file.close()


@dataclass(slots=True)
class LinkTraffic:
    """What streaming has brought to one device so far, and how long forwards waited for it there.

    The ``bytes`` count once for each use: to an accelerator as they cross its link, to the host as they rest.
    """

    bytes: int = 0
    stall_seconds: float = 0.0

    def add(self, other: LinkTraffic) -> None:
        """Count ``other`` too."""
        self.bytes += other.bytes
        self.stall_seconds += other.stall_seconds


@dataclass(slots=True)
class Traffic:
    """What streaming has cost so far.

    ``streamed_bytes`` were brought to where they compute, counted as they rest, ``storage_bytes`` of them read from
    storage; ``link_bytes`` were copied to an accelerator for it, as they crossed the link. Forwards waited
    ``stall_seconds``; reads waited ``link_seconds``, summed over the threads, until the link had taken what was read
    before. ``overflow_bytes`` is the most that lay outside the staging memory at once. Experts that tokens were routed
    to lay in a slot ``expert_hits`` times, counted once a call of their layer, and were brought ``expert_misses``
    times; of ``expert_guesses`` that were read before that was certain, ``expert_guesses_used`` came true, and count as
    brought. ``links`` has what fell to each device that computes something of what streams.
    """

    streamed_bytes: int = 0
    storage_bytes: int = 0
    link_bytes: int = 0
    stall_seconds: float = 0.0
    link_seconds: float = 0.0
    overflow_bytes: int = 0
    expert_hits: int = 0
    expert_misses: int = 0
    expert_guesses: int = 0
    expert_guesses_used: int = 0
    links: dict[DeviceId, LinkTraffic] = field(default_factory=dict)

    def count_use(self, device: DeviceId, *, at_rest: int, carried: int) -> None:
        """Count a use on ``device`` of what rests in so many bytes, of which so many were ``carried`` there."""
        self.streamed_bytes += at_rest
        self.links.setdefault(device, LinkTraffic()).bytes += carried

    def count_stall(self, device: DeviceId, seconds: float) -> None:
        """Count the ``seconds`` that a forward waited for something to come to ``device``."""
        self.stall_seconds += seconds
        self.links.setdefault(device, LinkTraffic()).stall_seconds += seconds

    def copy(self) -> Traffic:
        """Return it as it is now: it goes on counting."""
        return replace(self, links={device: replace(link) for device, link in self.links.items()})

    def since(self, before: Traffic) -> dict[DeviceId, LinkTraffic]:
        """Return what fell to each device since it was as ``before``."""
        nothing = LinkTraffic()
        earlier = {device: before.links.get(device, nothing) for device in self.links}
        return {
            device: LinkTraffic(link.bytes - earlier[device].bytes, link.stall_seconds - earlier[device].stall_seconds)
            for device, link in self.links.items()
        }


@dataclass(slots=True)
class Delivery(Generic[Region]):
    """A part on its way, or there: its region, what is under way to fill it, and the calls that use it.

    The region is null once the delivery has been given up, so that work which was cancelled holds no memory.
    """

    region: Region | None
    arriving: list[Future[Any]] = field(default_factory=list)
    users: int = 0
    overflow: bool = False

    @property
    def has_failed(self) -> bool:
        """Whether something that was to fill it has failed."""
        return any(work.done() and not work.cancelled() and work.exception() for work in self.arriving)


class Carrier(Protocol[Region]):
    """Brings parts, known by their numbers, into regions of a staging memory."""

    @property
    def sizes(self) -> Sequence[int]:
        """The staging memory that each part takes, in bytes."""

    @property
    def streamed(self) -> Sequence[int]:
        """The bytes of each part's tensors, as they rest."""

    @property
    def carried(self) -> Sequence[int]:
        """The bytes that come to where each part computes: over the link as they cross it, to the host as they rest."""

    @property
    def kept(self) -> Collection[int]:
        """The optional parts, where they have memory of their own: they may stay there unused, and nobody lacks it."""

    def take(self, part: int, *, ahead: bool = False, anywhere: bool = False) -> Region | None:
        """Return staging memory for ``part``, or null if there is none free.

        What is brought ``ahead`` leaves room for an optional part. One that has places of its own lies elsewhere only
        where it may lie ``anywhere``.
        """

    def beyond(self, part: int) -> Region:
        """Return memory for ``part`` outside the staging memory."""

    def bring(self, part: int, delivery: Delivery[Region]) -> None:
        """Start what fills the region of ``delivery`` with ``part``."""

    def abandon(self, arrived: Iterable[Future[Any]]) -> None:
        """Count the traffic of what has arrived and nobody will use, and have what comes into its region come after."""

    def wait(self, delivery: Delivery[Region]) -> None:
        """Return when whoever asks may use what was brought. Raises what bringing it raised."""

    def views(self, part: int, delivery: Delivery[Region]) -> list[torch.Tensor]:
        """Return the tensors of ``part``: views of the region."""

    def start_anew(self) -> bool:
        """Go on in a process that was forked, where no thread fills what it lent; return whether it can."""

    def close(self) -> None:
        """Let go of files and memory; nothing is under way any more."""
