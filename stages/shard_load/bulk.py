"""Reading many tensors at the speed of the storage: large aligned reads, several in flight.

The files are read in blocks that don't care where one tensor ends and the next begins. A block that the page cache
holds is copied from there. Any other is read directly (``O_DIRECT``), since the page cache would only hold a second
copy of weights that are in memory already: into an aligned buffer, and from there, cast on the way if need be, into
the tensors' own memory. So the memory held is that of the tensors and the few buffers.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType

import torch

from pipeline.errors import StorageError
from stages.shard_load.files import ShardFile, opened_shard, read_into
from stages.shard_load.reading import Extent, byte_view, torch_dtype

BLOCK_BYTES = 8 * 2**20
IN_FLIGHT = 4
_ALIGNMENT = 4096
_CANT_SKIP_WAITING = frozenset({errno.EAGAIN, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL})


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor to read: where it lies, and the contiguous cpu tensor that it is to fill, in that one's dtype."""

    extent: Extent
    target: torch.Tensor


@dataclass(slots=True)
class _Block:
    """A span of a file, and the parts of tensors in it: (first byte, first byte after, elements to fill, dtype)."""

    number: int
    parts: list[tuple[int, int, torch.Tensor, torch.dtype]] = field(default_factory=list)

    @property
    def begin(self) -> int:
        return min(part[0] for part in self.parts)

    @property
    def end(self) -> int:
        return max(part[1] for part in self.parts)


@dataclass(frozen=True, slots=True)
class _Handles:
    """A file opened twice: through the page cache, and directly (null where its file system can't)."""

    path: Path
    cached: int
    direct: int | None


class BulkReader:
    """Reads pieces with ``IN_FLIGHT`` threads, each with a buffer of ``BLOCK_BYTES``; a context manager."""

    def __enter__(self) -> BulkReader:
        self._pool = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="shard_load")
        self._buffers: SimpleQueue[mmap.mmap] = SimpleQueue()
        for _ in range(IN_FLIGHT):
            self._buffers.put(mmap.mmap(-1, BLOCK_BYTES))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)

    def read(self, pieces: Iterable[Piece], progress: Callable[[int], object]) -> None:
        """Fill the targets of ``pieces``, in the order in which they lie in their files.

        ``progress`` is called with the bytes of each block that was read.
        """
        by_file: dict[ShardFile, list[Piece]] = defaultdict(list)
        for piece in pieces:
            by_file[piece.extent.file].append(piece)
        with ExitStack() as stack:
            futures: list[Future[int]] = []
            for file, found in by_file.items():
                handles = stack.enter_context(_open_both(file))
                futures += [self._pool.submit(self._read_block, handles, block) for block in _blocks(found)]
            stack.callback(wait, futures)  # no file is closed under a thread that still reads it
            _gather(futures, progress)

    def _read_block(self, handles: _Handles, block: _Block) -> int:
        if not _read_cached(handles, block):
            buffer = self._buffers.get()
            try:
                _read_through(handles, block, buffer)
            finally:
                self._buffers.put(buffer)
        return sum(end - begin for begin, end, _, _ in block.parts)


def _gather(futures: list[Future[int]], progress: Callable[[int], object]) -> None:
    """Wait for all ``futures``; the first that fails cancels those that have not begun."""
    try:
        for future in futures:
            progress(future.result())
    finally:
        for future in futures:
            future.cancel()


def _blocks(pieces: Iterable[Piece]) -> Iterable[_Block]:
    """Return the blocks of one file that the pieces touch, in order."""
    blocks: dict[int, _Block] = {}
    for piece in (piece for piece in pieces if piece.target.numel()):
        dtype = torch_dtype(piece.extent.dtype)
        flat, begin = piece.target.view(-1), piece.extent.begin
        for number in range(begin // BLOCK_BYTES, -(-piece.extent.end // BLOCK_BYTES)):
            first = max(begin, number * BLOCK_BYTES)
            last = min(piece.extent.end, (number + 1) * BLOCK_BYTES)
            part = flat[(first - begin) // dtype.itemsize : (last - begin) // dtype.itemsize]
            blocks.setdefault(number, _Block(number)).parts.append((first, last, part, dtype))
    return [blocks[number] for number in sorted(blocks)]


def can_be_cut(extent: Extent) -> bool:
    """Return whether no element lies across the border of two blocks: the tensor is aligned to its own elements."""
    return extent.begin % torch_dtype(extent.dtype).itemsize == 0


@contextmanager
def _open_both(file: ShardFile) -> Iterator[_Handles]:
    with opened_shard(file) as cached:
        direct = _open_direct(file.path)
        try:
            yield _Handles(file.path, cached, direct)
        finally:
            if direct is not None:
                os.close(direct)


def _open_direct(path: Path) -> int | None:
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        return None
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | flag)
    except OSError:
        return None


def _read_cached(handles: _Handles, block: _Block) -> bool:
    """Fill the block's parts from the page cache, if it holds them all and none must be cast."""
    parts = sorted(block.parts, key=lambda part: part[0])
    follow = all(before[1] == after[0] for before, after in itertools.pairwise(parts))
    if not follow or any(part.dtype != dtype for _, _, part, dtype in parts) or not hasattr(os, "RWF_NOWAIT"):
        return False
    try:
        count = os.preadv(handles.cached, [byte_view(part) for _, _, part, _ in parts], block.begin, os.RWF_NOWAIT)
    except OSError as error:
        if error.errno in _CANT_SKIP_WAITING:
            return False
        raise StorageError(f"{handles.path}: reading at byte {block.begin} failed: {error.strerror}") from error
    return count == block.end - block.begin


def _read_through(handles: _Handles, block: _Block, buffer: mmap.mmap) -> None:
    """Fill the block's parts by way of ``buffer``, which is aligned as direct reads need it."""
    start = block.begin // _ALIGNMENT * _ALIGNMENT
    wanted = block.end - start
    if handles.direct is None or not _read_direct(handles, memoryview(buffer), start=start, wanted=wanted):
        read_into(handles.cached, memoryview(buffer)[:wanted], offset=start, path=handles.path)
    data = torch.frombuffer(buffer, dtype=torch.uint8)
    for begin, end, part, dtype in block.parts:
        part.copy_(data[begin - start : end - start].view(dtype))


def _read_direct(handles: _Handles, buffer: memoryview, *, start: int, wanted: int) -> bool:
    """Read ``wanted`` bytes at ``start``; false where the file system refuses, or the file ends early."""
    assert handles.direct is not None
    length = -(-wanted // _ALIGNMENT) * _ALIGNMENT
    done = 0
    while done < wanted:
        try:
            count = os.preadv(handles.direct, [buffer[done:length]], start + done)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise StorageError(f"{handles.path}: reading at byte {start + done} failed: {error.strerror}") from error
        done += count
        if done < wanted and (not count or done % _ALIGNMENT):
            return False
    return True
