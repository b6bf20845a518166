"""The files that weights are read from, held open: chunk by chunk, or a few bytes at a time, in any thread."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offstage.stages.checkpoints.direct_file import Chunk, DirectFile
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.shard_files import ShardFile, read_into

PAGE_BYTES = mmap.PAGESIZE

Traced = Callable[..., AbstractContextManager[Any]]
"""Returns what a read is done in, given a name, a category and details of it: see ``Trace.span``."""


def untraced(*_: object, **__: object) -> AbstractContextManager[None]:
    """Return what does nothing around a read."""
    return nullcontext()


class OpenFiles:
    """The ``files``, held open. At each use the one in question is held to what it was as the checkpoint was opened.

    Chunks are read directly, past the page cache. What is read ``once`` is copied from there instead where it was as
    the files were opened: what is read again and again has no second copy there for long.
    """

    def __init__(self, files: Iterable[ShardFile], *, once: bool = False, traced: Traced = untraced) -> None:
        self.traced = traced
        self._files = {file: DirectFile(file) for file in files}
        self._pages: dict[ShardFile, NDArray[np.bool_]] = {}
        if once:
            self._pages = {file: cached_pages(opened.descriptor, file.size) for file, opened in self._files.items()}

    def read(self, chunk: Chunk, target: memoryview) -> int:
        """Read ``chunk`` into ``target`` (aligned, ``chunk.length`` bytes); return how many bytes were wanted."""
        file = self._checked(chunk.file)
        with self.traced("read", "read", bytes=chunk.wanted, offset=chunk.offset):
            if not self.in_page_cache(chunk):
                return file.read(target, offset=chunk.offset, wanted=chunk.wanted)
            read_into(file.descriptor, target[: chunk.wanted], offset=chunk.offset, path=chunk.file.path)
            return chunk.wanted

    def read_small(self, span: Extent, target: memoryview) -> None:
        """Fill ``target`` with the bytes at ``span``, through the page cache."""
        file = self._checked(span.file)
        read_into(file.descriptor, target, offset=span.begin, path=span.file.path)

    def descriptor(self, file: ShardFile, chunk: Chunk | None) -> int | None:
        """Return what ``file`` is open as for a read of ``chunk``, or of a few bytes where that is null; null where it
        can't be read directly as it should.
        """
        opened = self._files[file]
        return opened.descriptor if chunk is None or self.in_page_cache(chunk) else opened.direct_descriptor

    def in_page_cache(self, chunk: Chunk) -> bool:
        """Return whether the page cache held all of ``chunk``, of what is read once."""
        pages = self._pages.get(chunk.file)
        return pages is not None and bool(pages[chunk.offset // PAGE_BYTES : -(-chunk.end // PAGE_BYTES)].all())

    def check(self, files: Iterable[ShardFile]) -> None:
        """Raise a ``CheckpointError`` if one of ``files`` isn't what it was as the checkpoint was opened."""
        for file in files:
            self._checked(file)

    def close(self) -> None:
        """Close the files; closing again does nothing."""
        for file in self._files.values():
            file.close()

    def _checked(self, file: ShardFile) -> DirectFile:
        opened = self._files[file]
        opened.check()
        return opened


def cached_pages(descriptor: int, size: int) -> NDArray[np.bool_]:
    """Return, for each page of the open file of ``size`` bytes, whether the page cache holds it.

    Where that can't be told (another system, or a file of somebody else's, for which Linux would always say yes), no
    page counts as held. A read that doesn't wait (``RWF_NOWAIT``) would tell too, but on today's kernels it starts a
    read-ahead, which then competes with the direct read that follows.
    """
    pages = np.zeros(-(-size // PAGE_BYTES), dtype=np.uint8)
    mincore = getattr(_libc(), "mincore", None)
    if mincore is None or not size or not _may_ask(descriptor):
        return pages.astype(np.bool_)
    try:
        mapped = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except OSError:
        return pages.astype(np.bool_)
    # It isn't closed but let go: to close it after an interrupt, of which the array's frames are a part, is an error.
    address = np.frombuffer(mapped, dtype=np.uint8).ctypes.data
    if mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data)):
        pages[:] = 0
    return (pages & 1).astype(np.bool_)


def _libc() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):
        return None


def _may_ask(descriptor: int) -> bool:
    return os.geteuid() in (0, os.fstat(descriptor).st_uid)
