"""Saved bytes wait on disk, in files without a name: whatever ends the process, the system takes them back.

They are written past the page cache, by way of a few aligned buffers, while the forward pass goes on, and read as
weights are (``DirectFile``): straight into the host's memory where the backward pass needs them there, and for an
accelerator by way of a few buffers more. It copies to and from these by itself; a block is written once it has come.
Room on the disk is taken before anything is written to it, so a full disk shows in the forward pass.
"""

from __future__ import annotations

import errno
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait as wait_for_all
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import torch

from offstage.pipeline.errors import StorageError, apart
from offstage.stages.checkpoints.direct_file import DirectFile, open_direct
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.dispatch.transfer.link import Event, Link
from offstage.stages.dispatch.transfer.links import open_link
from offstage.stages.dispatch.transfer.pinned_buffers import Buffer, PinnedBuffers, SharedBuffer
from offstage.stages.dispatch.transfer.reading_threads import reader_pool
from offstage.stages.dispatch.transfer.trace import Trace
from offstage.stages.finetune.stores import ActivationStore, Follow, span
from offstage.stages.machine.aligned_memory import ALIGNMENT, TensorRoom, align_up
from offstage.stages.machine.devices import Devices
from offstage.stages.units import CPU, DeviceId, format_bytes

BLOCK_BYTES = 4 * 2**20
IN_FLIGHT = 4
"""Blocks being written at once, or read for an accelerator; each has a buffer."""


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class FileRegion:
    """A stretch of a scratch file, which stays open for as long as any of its regions is held; its ``writes``."""

    file: ScratchFile
    begin: int
    writes: list[Future[None]] = field(default_factory=list)


class ScratchFile:
    """``size`` bytes on the disk of ``folder``, in a file that has no name any more."""

    alignment = ALIGNMENT

    def __init__(self, folder: Path, size: int) -> None:
        self.size = align_up(size)
        self._folder = folder
        with self._explained(f"taking room for {format_bytes(self.size)} of activations"):
            folder.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(prefix=".tmp-activations-", dir=folder)
        path = Path(name)
        self._descriptor = descriptor
        with ExitStack() as failed:
            failed.callback(weakref.finalize(self, os.close, descriptor))
            with ExitStack() as named:
                named.callback(path.unlink, missing_ok=True)
                self._allocate()
                self._direct = open_direct(path, descriptor, os.O_WRONLY)
                self._reader = DirectFile(ShardFile(path.name, path, self.size, None, ""))
            failed.pop_all()
        if self._direct is not None:
            weakref.finalize(self, os.close, self._direct)

    def _allocate(self) -> None:
        """Take the bytes of the disk; a file system that can't promise them shows it when they are written."""
        with self._explained(f"taking room for {format_bytes(self.size)} of activations"):
            try:
                os.posix_fallocate(self._descriptor, 0, self.size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    raise
                os.ftruncate(self._descriptor, self.size)

    def lend(self, begin: int, length: int) -> tuple[FileRegion, object]:
        """Return the region at ``begin``."""
        region = FileRegion(self, begin)
        return region, region

    def write(self, source: memoryview, offset: int) -> None:
        """Write ``source``, aligned as ``offset`` is, past the page cache where the file system lets one."""
        with self._explained(f"writing {format_bytes(len(source))} of activations"):
            done = self._write_direct(source, offset) if self._direct is not None else 0
            while done < len(source):
                done += os.pwrite(self._descriptor, source[done:], offset + done)

    def _write_direct(self, source: memoryview, offset: int) -> int:
        """Write what can be written directly; return how many bytes that was."""
        assert self._direct is not None
        done = 0
        while done < len(source) and done % ALIGNMENT == 0:
            try:
                done += os.pwrite(self._direct, source[done:], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    return done
                raise
        return done

    def read(self, target: memoryview, offset: int) -> None:
        """Fill ``target``, aligned as ``offset`` is."""
        self._reader.read(target, offset=offset, wanted=len(target))

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"{self._folder}: {doing} failed: {error.strerror or error}; free some space there, choose a folder on"
                " a larger disk, or lower offload_ratio"
            ) from apart(error)


class _Returning:
    """Blocks that ``jobs`` read and have copied over ``link`` into ``target``, which lives until they are there."""

    def __init__(self, link: Link, target: torch.Tensor, jobs: Iterable[Future[Event]]) -> None:
        self._link, self._target, self._jobs = link, target, deque(jobs)

    def follow(self) -> None:
        """Put what is computed from now on behind the copies; raises what a read raised."""
        while self._jobs:
            self._link.follow(self._jobs[0].result())
            self._jobs.popleft()

    def __del__(self) -> None:
        wait_for_all(self._jobs)
        for job in self._jobs:
            if job.exception() is None:
                self._link.finish(job.result())


class DiskStore(ActivationStore[FileRegion]):
    """Puts bytes away in ``folder``, to which they go over the link ``out``, and from where they come over ``back``.

    Each way has buffers of its own: those that wait to be written are never in the way of what is read.
    """

    def __init__(self, devices: Devices, device: DeviceId, folder: Path, *, out: Link, back: Link) -> None:
        super().__init__(devices, device)
        self._folder, self._out, self._back = folder, out, back

    @cached_property
    def _leaving(self) -> PinnedBuffers:
        return PinnedBuffers(self._out, count=IN_FLIGHT, size=BLOCK_BYTES)

    @cached_property
    def _coming(self) -> PinnedBuffers:
        """On the host little comes so, what fills no page: one buffer, a first touch of which takes large pages."""
        return PinnedBuffers(self._back, count=1 if self._device == CPU else IN_FLIGHT, size=BLOCK_BYTES)

    def send(self, source: torch.Tensor, region: FileRegion, trace: Trace | None) -> Follow | None:
        """Ask for the copies of ``source``, block by block as there are buffers, each of which is written then."""
        after, copied = self._out.computed(), None
        for begin in range(0, source.nbytes, BLOCK_BYTES):
            part, shared = source[begin : begin + BLOCK_BYTES], SharedBuffer(self._leaving, 1)
            buffer = shared.take()
            copied = self._out.copy([(part, buffer.tensor[: part.nbytes])], after=after)
            buffer.note_copy(self._out, copied)
            write = partial(_write, region, begin, buffer, length=align_up(part.nbytes), trace=trace)
            region.writes.append(reader_pool().submit(write))
            shared.watch(region.writes[-1])
        return None if copied is None else partial(self._out.follow, copied)

    def fetch(self, region: FileRegion, room: TensorRoom, size: int, *, trace: Trace | None) -> Follow:
        """Start the reads once all is written: straight into ``room`` where whole pages of the host are behind it."""
        _wait_for(region.writes)
        region.writes.clear()
        blocks, length = range(0, size, BLOCK_BYTES), align_up(size)
        if room.memory is not None:
            parts = [room.memory[begin : min(begin + BLOCK_BYTES, length)] for begin in blocks]
            reads = [
                reader_pool().submit(_read, region, begin, part, trace)
                for begin, part in zip(blocks, parts, strict=True)
            ]
            return partial(_wait_for, reads)
        after, target = self._back.computed(), room.tensor[:size]
        jobs = [
            reader_pool().submit(self._pass_on, region, begin, target[begin : begin + BLOCK_BYTES], after, trace)
            for begin in blocks
        ]
        return _Returning(self._back, target, jobs).follow

    def _pass_on(
        self, region: FileRegion, begin: int, target: torch.Tensor, after: Event, trace: Trace | None
    ) -> Event:
        """Read a block and have it copied to ``target``; return when it is. Runs in a thread that reads."""
        with self._coming.lend() as buffer:
            _read(region, begin, buffer.memory[: align_up(target.nbytes)].data, trace)
            copied = self._back.copy([(buffer.tensor[: target.nbytes], target)], after=after)
            buffer.note_copy(self._back, copied)
        return copied

    def _memory(self, size: int, *, least: int) -> ScratchFile:
        with suppress(StorageError):
            return ScratchFile(self._folder, size)
        return ScratchFile(self._folder, least)


def open_disk_store(devices: Devices, device: DeviceId, folder: Path) -> DiskStore:
    """Return the store in files of ``folder`` for ``device``."""
    return DiskStore(devices, device, folder, out=open_link(devices, device), back=open_link(devices, device))


def _write(region: FileRegion, begin: int, buffer: Buffer, *, length: int, trace: Trace | None) -> None:
    """Write what ``buffer`` has, once it has come there."""
    buffer.wait()
    with span(trace, "out", "write", length):
        region.file.write(buffer.memory[:length].data, region.begin + begin)


def _read(region: FileRegion, begin: int, target: memoryview, trace: Trace | None) -> None:
    with span(trace, "back", "read", len(target)):
        region.file.read(target, region.begin + begin)


def _wait_for(jobs: Iterable[Future[None]]) -> None:
    for job in jobs:
        job.result()
