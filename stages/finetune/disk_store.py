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
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch

from offstage.pipeline.errors import StorageError
from offstage.stages.checkpoints.direct_file import DirectFile
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.dispatch.transfer.reading_threads import reader_pool
from offstage.stages.dispatch.transfer.trace import Trace
from offstage.stages.finetune.stores import ActivationStore, Rooms, span
from offstage.stages.machine.aligned_memory import ALIGNMENT, Bytes, align_up, buffer_bytes, private_bytes
from offstage.stages.units import format_bytes

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
                self._direct = _open_direct(path, descriptor)
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


def _open_direct(path: Path, descriptor: int) -> int | None:
    with suppress(OSError):
        direct = os.open(path, os.O_WRONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
        if os.path.samestat(os.fstat(direct), os.fstat(descriptor)):
            return direct
        os.close(direct)
    return None


@dataclass(frozen=True, slots=True)
class _BlockWrite:
    """What is written at once: ``length`` bytes at ``begin`` of a region."""

    region: FileRegion
    begin: int
    length: int
    trace: Trace | None


class DiskStore(ActivationStore[FileRegion]):
    """Puts bytes away in ``folder``."""

    def __init__(self, folder: Path, rooms: Rooms) -> None:
        super().__init__(rooms)
        self._folder = folder
        self._buffers: SimpleQueue[Bytes | None] = SimpleQueue()
        for _ in range(IN_FLIGHT):
            self._buffers.put(None)  # made when it is first wanted

    def put(self, source: torch.Tensor, trace: Trace | None) -> DiskParcel:
        """Write ``source``. It is copied when this returns, and written a little later."""
        region = self.take(align_up(source.nbytes))
        writes: list[Future[None]] = []
        for begin in range(0, source.nbytes, BLOCK_BYTES):
            part = source[begin : begin + BLOCK_BYTES]
            kept = self._buffers.get()
            buffer = buffer_bytes(BLOCK_BYTES) if kept is None else kept
            torch.frombuffer(buffer, dtype=torch.uint8, count=part.nbytes).copy_(part)
            block = _BlockWrite(region, begin, align_up(part.nbytes), trace)
            writes.append(reader_pool().submit(self._write, buffer, block))
        return DiskParcel(region, writes, source.nbytes, trace)

    def _memory(self, size: int, *, least: int) -> ScratchFile:
        with suppress(StorageError):
            return ScratchFile(self._folder, size)
        return ScratchFile(self._folder, least)

    def _write(self, buffer: Bytes, block: _BlockWrite) -> None:
        try:
            with span(block.trace, "out", "write", block.length):
                block.region.file.write(buffer[: block.length].data, block.region.begin + block.begin)
        finally:
            self._buffers.put(buffer)


class DiskParcel:
    """Bytes in a region of a scratch file, there when the ``writes`` are done."""

    leaving = False

    def __init__(self, region: FileRegion, writes: list[Future[None]], size: int, trace: Trace | None) -> None:
        self._region, self._writes, self._size, self._trace = region, writes, size, trace
        self._reads: list[Future[None]] = []
        self._copy: tuple[memoryview, torch.Tensor] | None = None  # on to another device, after the reads

    def settle(self) -> None:
        """Do nothing: the source was copied."""

    def fetch(self, target: torch.Tensor) -> None:
        """Start the reads into ``target``, if it is on the host, else into memory there."""
        for write in self._writes:
            write.result()
        self._writes = []
        memory = _whole_pages(target) if target.is_cpu else private_bytes(align_up(self._size)).data
        length = align_up(self._size)
        self._reads = [
            reader_pool().submit(self._read, memory[begin : min(begin + BLOCK_BYTES, length)], begin)
            for begin in range(0, length, BLOCK_BYTES)
        ]
        self._copy = None if target.is_cpu else (memory, target)

    def _read(self, target: memoryview, begin: int) -> None:
        with span(self._trace, "back", "read", len(target)):
            self._region.file.read(target, self._region.begin + begin)

    def finish(self) -> None:
        """Wait for the reads."""
        for read in self._reads:
            read.result()
        self._reads = []
        if self._copy is not None:
            memory, target = self._copy
            target.copy_(torch.frombuffer(memory, dtype=torch.uint8, count=target.nbytes))
            self._copy = None


def _whole_pages(room: torch.Tensor) -> memoryview:
    """Return the memory from where ``room`` begins to the end of its storage, which is of whole pages."""
    storage, begin = room.untyped_storage(), room.storage_offset()
    whole = torch.empty(0, dtype=torch.uint8).set_(storage, begin, (storage.nbytes() - begin,), (1,))
    return whole.numpy().data
