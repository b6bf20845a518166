"""Files held open for direct reads, which leave no second copy of the weights in the page cache.

A direct read is aligned, and so an extent is cut into aligned chunks.
"""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from offstage.pipeline.errors import StorageError
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.shard_files import ShardFile, check_unchanged, open_file, read_into
from offstage.stages.machine.aligned_memory import ALIGNMENT, align_down, align_up


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of an extent that is read at once, from the aligned ``offset`` on: bytes ``begin`` to ``end`` of ``file``
    are the tensor's.
    """

    file: ShardFile
    offset: int
    begin: int
    end: int

    @property
    def skipped(self) -> int:
        """Bytes before the tensor's first, which are read since reads are aligned."""
        return self.begin - self.offset

    @property
    def wanted(self) -> int:
        """Bytes to read, up to the tensor's last."""
        return self.end - self.offset

    @property
    def length(self) -> int:
        """Bytes of memory that the read needs: ``wanted``, up to the next aligned offset."""
        return align_up(self.wanted)


def whole(extent: Extent) -> Chunk:
    """Return the one aligned read that brings ``extent``."""
    return Chunk(extent.file, align_down(extent.begin), extent.begin, extent.end)


def cut(extent: Extent, chunk_bytes: int) -> Iterator[Chunk]:
    """Yield the aligned reads, of ``chunk_bytes`` (aligned) at most, that bring ``extent``; none if it is empty."""
    for offset in range(align_down(extent.begin), extent.end if extent.bytes else 0, chunk_bytes):
        yield Chunk(extent.file, offset, max(extent.begin, offset), min(extent.end, offset + chunk_bytes))


class DirectFile:
    """A shard that is read again and again: opened once, checked at each use.

    Where its file system refuses direct reads it is read through the page cache, which is told to forget it.
    """

    def __init__(self, file: ShardFile) -> None:
        self._file = file
        self._cached = open_file(file.path)
        self._direct = open_direct(file.path, self._cached, os.O_RDONLY | os.O_NONBLOCK)
        opened = [descriptor for descriptor in (self._cached, self._direct) if descriptor is not None]
        self._closing = weakref.finalize(self, _close, opened)  # a model that is let go leaves no file open
        self.check()

    @property
    def descriptor(self) -> int:
        """The descriptor of the file as the page cache has it."""
        return self._cached

    @property
    def direct_descriptor(self) -> int | None:
        """The descriptor for direct reads; null where its file system refuses them."""
        return self._direct

    def check(self) -> None:
        """Raise a ``CheckpointError`` if the file is not what it was when the checkpoint was opened."""
        check_unchanged(self._file, self._cached)

    def read(self, target: memoryview, *, offset: int, wanted: int) -> int:
        """Fill the first ``wanted`` bytes of ``target`` with what lies at ``offset``; return ``wanted``.

        Offset, address and length of ``target`` are aligned. A failure names the file and the offset.
        """
        done = 0
        while self._direct is not None and done < wanted and done % ALIGNMENT == 0:
            try:
                count = os.preadv(self._direct, [target[done:]], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    break
                raise StorageError(
                    f"{self._file.path}: reading at byte {offset + done} failed: {error.strerror}"
                ) from error
            if not count:
                break
            done += count
        if done < wanted:
            read_into(self._cached, target[done:wanted], offset=offset + done, path=self._file.path)
            os.posix_fadvise(self._cached, offset + done, wanted - done, os.POSIX_FADV_DONTNEED)
        return wanted

    def close(self) -> None:
        """Close the file; closing it again does nothing."""
        self._closing()


def open_direct(path: Path, fd: int, flags: int) -> int | None:
    """Return a descriptor of the file ``path``, open as ``fd`` too, past the page cache; null where its file system
    refuses that.
    """
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
    except OSError:
        return None
    if os.path.samestat(os.fstat(descriptor), os.fstat(fd)):
        return descriptor
    os.close(descriptor)  # another file has come in its place just now; what was opened first is used
    return None


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        with suppress(OSError):  # closed all the same; it may happen as the process ends, where nobody could be told
            os.close(descriptor)
