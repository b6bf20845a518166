"""Reading many tensors at the speed of the storage: large aligned reads, several in flight.

The files are read in blocks that don't care where one tensor ends and the next begins. A block that the page cache
holds is copied from there. Any other is read directly (``O_DIRECT``), since the page cache would only hold a second
copy of weights that are in memory already: into an aligned buffer, and from there, cast on the way if need be, into
the tensors' own memory. So the memory held is that of the tensors and the few buffers.
"""

from __future__ import annotations

import mmap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray

from stages.shard_load.direct import DirectFile, align_down, align_up
from stages.shard_load.files import ShardFile, read_into
from stages.shard_load.page_cache import PAGE_BYTES, cached_pages
from stages.shard_load.reading import Extent, byte_view, torch_dtype

BLOCK_BYTES = 8 * 2**20
IN_FLIGHT = 4
_OPEN_FILES = 64
_ALONE_ELEMENTS = 2**15 - 1
"""Up to here torch copies without threads (its grain size is 2**15 elements)."""


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
class _Source:
    """A file held open, and of each of its pages whether the page cache held it when the file was opened."""

    path: Path
    file: DirectFile
    pages: NDArray[np.bool_]

    def holds(self, block: _Block) -> bool:
        """Return whether the page cache held all of ``block``."""
        return bool(self.pages[block.begin // PAGE_BYTES : -(-block.end // PAGE_BYTES)].all())


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
        files = list(by_file)
        for start in range(0, len(files), _OPEN_FILES):
            self._read_files({file: by_file[file] for file in files[start : start + _OPEN_FILES]}, progress)

    def _read_files(self, by_file: Mapping[ShardFile, list[Piece]], progress: Callable[[int], object]) -> None:
        with ExitStack() as stack:
            sources = {file: stack.enter_context(_opened(file)) for file in by_file}
            futures: list[Future[int]] = []
            stack.callback(wait, futures)  # runs before the files are closed: no thread reads one that isn't open
            for file, pieces in by_file.items():
                futures += [self._pool.submit(self._read_block, sources[file], block) for block in _blocks(pieces)]
            _gather(futures, progress)

    def _read_block(self, source: _Source, block: _Block) -> int:
        held = source.holds(block)
        if not (held and _read_straight(source, block)):
            buffer = self._buffers.get()
            try:
                _read_by_way_of(buffer, source, block, cached=held)
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
def _opened(file: ShardFile) -> Iterator[_Source]:
    with closing(DirectFile(file)) as opened:
        yield _Source(file.path, opened, cached_pages(opened.descriptor, file.size))


def _read_straight(source: _Source, block: _Block) -> bool:
    """Fill the block's parts from the page cache, without a buffer between; false where one must be cast."""
    if any(part.dtype != dtype for _, _, part, dtype in block.parts):
        return False
    for begin, _, part, _ in block.parts:
        read_into(source.file.descriptor, byte_view(part), offset=begin, path=source.path)
    return True


def _read_by_way_of(buffer: mmap.mmap, source: _Source, block: _Block, *, cached: bool) -> None:
    """Fill the block's parts by way of ``buffer``, which is aligned as direct reads need it."""
    start = align_down(block.begin)
    wanted, view = block.end - start, memoryview(buffer)
    if cached:
        read_into(source.file.descriptor, view[:wanted], offset=start, path=source.path)
    else:
        source.file.read(view[: align_up(wanted)], offset=start, wanted=wanted)
    data = torch.frombuffer(buffer, dtype=torch.uint8)
    for begin, end, part, dtype in block.parts:
        _copy(part, data[begin - start : end - start].view(dtype))


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy and cast in this thread alone: torch would start threads of its own in each of ours for more."""
    for start in range(0, source.numel(), _ALONE_ELEMENTS):
        stop = start + _ALONE_ELEMENTS
        target[start:stop].copy_(source[start:stop])
