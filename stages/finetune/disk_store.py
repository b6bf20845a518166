"""Saved bytes wait on disk, in files without a name: whatever ends the process, the system takes them back.

They are written past the page cache, by way of a few aligned buffers, while the forward pass goes on, and read as
weights are (``DirectFile``), straight into the memory where the backward pass needs them. Room on the disk is taken
before anything is written to it, so a full disk shows in the forward pass.
"""

from __future__ import annotations

import errno
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import torch

from offstage.pipeline.errors import StorageError
from offstage.stages.checkpoints.direct_file import DirectFile, open_direct
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.dispatch.transfer.reading_threads import reader_pool
from offstage.stages.dispatch.transfer.trace import Trace
from offstage.stages.finetune.stores import ActivationStore, Follow, span
from offstage.stages.machine.aligned_memory import ALIGNMENT, Bytes, TensorRoom, align_up, buffer_bytes, private_bytes
from offstage.stages.machine.devices import Devices
from offstage.stages.units import DeviceId, format_bytes

BLOCK_BYTES = 4 * 2**20
IN_FLIGHT = 4
"""Blocks being written at once; each has a buffer."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class FileRegion:
    """A stretch of a scratch file, which stays open for as long as any of its regions is held."""

    file: ScratchFile
    begin: int


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
            ) from error


class DiskStore(ActivationStore[FileRegion]):
    """Puts bytes away in ``folder``. They are copied when they are put, and written a little later."""

    needs_source = False

    def __init__(self, devices: Devices, device: DeviceId, folder: Path) -> None:
        super().__init__(devices, device)
        self._folder = folder
        self._buffers: SimpleQueue[Bytes | None] = SimpleQueue()
        for _ in range(IN_FLIGHT):
            self._buffers.put(None)  # made when it is first wanted

    def send(self, source: torch.Tensor, region: FileRegion, trace: Trace | None) -> Follow:
        """Copy ``source`` and start the writes; who comes after them waits for them here."""
        writes: list[Future[None]] = []
        for begin in range(0, source.nbytes, BLOCK_BYTES):
            part = source[begin : begin + BLOCK_BYTES]
            kept = self._buffers.get()
            buffer = buffer_bytes(BLOCK_BYTES) if kept is None else kept
            torch.frombuffer(buffer, dtype=torch.uint8, count=part.nbytes).copy_(part)
            write = partial(self._write, region, begin, buffer, length=align_up(part.nbytes), trace=trace)
            writes.append(reader_pool().submit(write))
        return partial(_wait_for, writes)

    def _write(self, region: FileRegion, begin: int, buffer: Bytes, *, length: int, trace: Trace | None) -> None:
        try:
            with span(trace, "out", "write", length):
                region.file.write(buffer[:length].data, region.begin + begin)
        finally:
            self._buffers.put(buffer)

    def fetch(self, region: FileRegion, room: TensorRoom, size: int, *, trace: Trace | None) -> Follow:
        """Start the reads, straight into ``room`` where whole pages of the host are behind it."""
        length = align_up(size)
        memory = private_bytes(length).data if room.memory is None else room.memory
        reads = [
            reader_pool().submit(_read, region, begin, memory[begin : min(begin + BLOCK_BYTES, length)], trace)
            for begin in range(0, length, BLOCK_BYTES)
        ]

        def follow() -> None:
            _wait_for(reads)
            if room.memory is None:
                room.tensor[:size].copy_(torch.frombuffer(memory, dtype=torch.uint8, count=size))

        return follow

    def _memory(self, size: int, *, least: int) -> ScratchFile:
        with suppress(StorageError):
            return ScratchFile(self._folder, size)
        return ScratchFile(self._folder, least)


def _read(region: FileRegion, begin: int, target: memoryview, trace: Trace | None) -> None:
    with span(trace, "back", "read", len(target)):
        region.file.read(target, region.begin + begin)


def _wait_for(jobs: Iterable[Future[None]]) -> None:
    for job in jobs:
        job.result()
