"""Reading many tensors at the speed of the storage: large aligned reads, several in flight.

What the page cache holds is copied from there, straight into the tensors. All else is read directly (``O_DIRECT``),
since the page cache would only hold a second copy of weights that are in memory already. A tensor whose memory is laid
out for it (``TensorRoom``) is read into in place. Others, small ones and such as must be cast, come by way of an
aligned buffer, neighbours together; so does what rests packed, and the thread that read it unpacks it to where it
stays. So the memory held is that of the tensors and the few buffers.
"""

from __future__ import annotations

import mmap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from offstage.stages.checkpoints.direct_file import Chunk, DirectFile, cut
from offstage.stages.checkpoints.dtypes import torch_dtype
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.packed import BLOCK_BYTES, AtRest, PackedBlock, PackedTensor, in_pieces
from offstage.stages.checkpoints.packed_reads import bring_block, lent, read_span, room_at_rest
from offstage.stages.checkpoints.page_cache import PAGE_BYTES, cached_pages
from offstage.stages.checkpoints.shard_files import ShardFile, opened_shard, read_into
from offstage.stages.machine.aligned_memory import (
    TENSOR_ALIGNMENT,
    Bytes,
    align_down,
    align_up,
    byte_view,
    private_bytes,
    private_memory,
)
from offstage.stages.machine.devices import Devices
from offstage.stages.machine.operator_threads import alone
from offstage.stages.units import DeviceId

IN_FLIGHT = 8
"""More than storage needs: some of the threads are held up by memory that is touched for the first time."""
GAP_BYTES = 2**18
"""Neighbours at most so far apart are read together, with what lies between them."""
_OPEN_FILES = 64


@dataclass(frozen=True, slots=True)
class TensorRead:
    """One tensor to read: where it lies, and the contiguous tensor that it is to fill, in that one's dtype.

    What is packed is unpacked to that dtype. ``memory``, where there is one, is the aligned memory around the target,
    from the aligned offset before its extent to the one after it.
    """

    extent: AtRest
    target: torch.Tensor
    memory: memoryview | None = None


def read_into_new_memory(
    extent: AtRest, dtype: torch.dtype, *, devices: Devices, device: DeviceId, aligned: bool = False
) -> TensorRead:
    """Return the piece that reads ``extent`` into new memory on ``device`` as ``dtype``.

    What is used as it rests lies on the host as it does in its file, see ``room_for``, unless it is to be ``aligned``;
    on an accelerator it is, as what streams there is.
    """
    as_in_file = isinstance(extent, Extent) and torch_dtype(extent.dtype) == dtype
    if not as_in_file or ((aligned or devices.is_apart(device)) and extent.begin % TENSOR_ALIGNMENT):
        return TensorRead(extent, devices.room(extent.shape, dtype, device).tensor)
    assert isinstance(extent, Extent)
    room = devices.room(extent.shape, dtype, device, offset=extent.begin)
    return TensorRead(extent, room.tensor, room.memory)


@dataclass(frozen=True, slots=True)
class _OpenFile:
    """A file held open, and of each of its pages whether the page cache held it when the file was opened."""

    path: Path
    file: DirectFile
    pages: NDArray[np.bool_]

    def holds(self, begin: int, end: int) -> bool:
        """Return whether the page cache held all bytes from ``begin`` to ``end``."""
        return bool(self.pages[begin // PAGE_BYTES : -(-end // PAGE_BYTES)].all())

    def read(self, target: memoryview, *, offset: int, wanted: int) -> None:
        """Fill the first ``wanted`` bytes of ``target``, from the page cache if it holds them, else directly."""
        if self.holds(offset, offset + wanted):
            read_into(self.file.descriptor, target[:wanted], offset=offset, path=self.path)
        else:
            self.file.read(target, offset=offset, wanted=wanted)

    def read_chunk(self, chunk: Chunk, target: memoryview) -> None:
        """Read ``chunk``, of this file or another of the checkpoint's, into ``target``."""
        if chunk.file.path == self.path:
            self.read(target, offset=chunk.offset, wanted=chunk.wanted)
        else:
            with opened_shard(chunk.file) as descriptor:
                read_into(descriptor, target[: chunk.wanted], offset=chunk.offset, path=chunk.file.path)

    def read_span(self, span: Extent, target: memoryview) -> None:
        """Read ``span``, of this file or another of the checkpoint's, through the page cache."""
        if span.file.path == self.path:
            read_into(self.file.descriptor, target, offset=span.begin, path=self.path)
        else:
            read_span(span, target)


class _FileRead(Protocol):
    """A part of a file that is read at once."""

    def read(self, source: _OpenFile, buffers: SimpleQueue[mmap.mmap]) -> int:
        """Read it; return how many bytes of tensors that was."""


@dataclass(frozen=True, slots=True)
class _DirectRead:
    """A chunk of a tensor, read into ``target``: the aligned memory around where it stays."""

    chunk: Chunk
    target: memoryview

    def read(self, source: _OpenFile, buffers: SimpleQueue[mmap.mmap]) -> int:
        """Read from the page cache or directly: the bytes land where they stay."""
        source.read(self.target, offset=self.chunk.offset, wanted=self.chunk.wanted)
        return self.chunk.end - self.chunk.begin


@dataclass(frozen=True, slots=True)
class _TensorSlice:
    """A part of a tensor: its first byte in the file and the one after its last, and the elements to fill."""

    begin: int
    end: int
    target: torch.Tensor
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Block:
    """Neighbouring parts of tensors, in the order of the file."""

    parts: list[_TensorSlice]

    def read(self, source: _OpenFile, buffers: SimpleQueue[mmap.mmap]) -> int:
        """Read straight from the page cache where nothing is cast, else by way of a buffer."""
        cached = source.holds(self.parts[0].begin, self.parts[-1].end)
        if cached and all(part.target.dtype == part.dtype and part.target.is_cpu for part in self.parts):
            for part in self.parts:
                read_into(source.file.descriptor, byte_view(part.target), offset=part.begin, path=source.path)
        else:
            with lent(buffers) as buffer:
                self._read_by_way_of(buffer, source)
        return sum(part.end - part.begin for part in self.parts)

    def _read_by_way_of(self, buffer: mmap.mmap, source: _OpenFile) -> None:
        """Fill the parts by way of ``buffer``, which is aligned as direct reads need it."""
        start = align_down(self.parts[0].begin)
        wanted = self.parts[-1].end - start
        source.read(memoryview(buffer)[: align_up(wanted)], offset=start, wanted=wanted)
        data = torch.frombuffer(buffer, dtype=torch.uint8)
        for part in self.parts:
            _copy(part.target, data[part.begin - start : part.end - start].view(part.dtype))


@dataclass(frozen=True, slots=True)
class _BlockRead:
    """A block of a packed tensor, unpacked to its place in ``target``: the bytes of the whole tensor."""

    tensor: PackedTensor
    block: PackedBlock
    target: Bytes

    def read(self, source: _OpenFile, buffers: SimpleQueue[mmap.mmap]) -> int:
        """Read by way of a buffer, or of new memory where the block is larger than that."""
        room = room_at_rest(self.block)
        small, direct = source.read_span, source.read_chunk
        with lent(buffers) as lent_buffer:
            buffer = np.frombuffer(lent_buffer, np.uint8) if room <= BLOCK_BYTES else private_bytes(room)
            return bring_block(self.tensor, self.block, self.target, buffer=buffer, small=small, direct=direct)


@dataclass(frozen=True, slots=True)
class _PieceRead:
    """A packed tensor, or rows of one, that goes to an accelerator: ``target`` is its bytes there."""

    tensor: PackedTensor
    target: torch.Tensor

    def read(self, source: _OpenFile, buffers: SimpleQueue[mmap.mmap]) -> int:
        """Unpack on the host, and copy."""
        made = private_bytes(self.tensor.bytes)
        blocks = self.tensor.codec.blocks(self.tensor)
        count = sum(_BlockRead(self.tensor, block, made).read(source, buffers) for block in blocks)
        self.target.copy_(torch.from_numpy(made)[: self.tensor.bytes])
        return count


class BulkReader:
    """Reads pieces with ``IN_FLIGHT`` threads, each with a buffer of ``BLOCK_BYTES``; a context manager."""

    def __enter__(self) -> BulkReader:
        self._pool = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="shard_load")
        self._buffers: SimpleQueue[mmap.mmap] = SimpleQueue()
        for _ in range(IN_FLIGHT):
            self._buffers.put(private_memory(BLOCK_BYTES))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)

    def read(self, pieces: Iterable[TensorRead], progress: Callable[[int], object]) -> None:
        """Fill the targets of ``pieces``, in the order in which they lie in their files.

        ``progress`` is called with the bytes of each block that was read.
        """
        by_file: dict[ShardFile, list[TensorRead]] = defaultdict(list)
        for piece in pieces:
            by_file[piece.extent.file].append(piece)
        files = list(by_file)
        for start in range(0, len(files), _OPEN_FILES):
            self._read_files({file: by_file[file] for file in files[start : start + _OPEN_FILES]}, progress)

    def _read_files(self, by_file: Mapping[ShardFile, list[TensorRead]], progress: Callable[[int], object]) -> None:
        with ExitStack() as stack:
            sources = {file: stack.enter_context(_opened(file)) for file in by_file}
            futures: list[Future[int]] = []
            stack.callback(wait, futures)  # runs before the files are closed: no thread reads one that isn't open
            for file, pieces in by_file.items():
                futures += [self._pool.submit(job.read, sources[file], self._buffers) for job in _jobs(pieces)]
            _gather(futures, progress)


def _gather(futures: list[Future[int]], progress: Callable[[int], object]) -> None:
    """Wait for all ``futures``; the first that fails cancels those that have not begun."""
    try:
        for future in futures:
            progress(future.result())
    finally:
        for future in futures:
            future.cancel()


def _jobs(pieces: Iterable[TensorRead]) -> list[_FileRead]:
    """Return what is to be read of one file."""
    in_place: list[_FileRead] = []
    parts: list[_TensorSlice] = []
    for piece in (piece for piece in pieces if piece.target.numel()):
        if isinstance(piece.extent, PackedTensor):
            in_place += _unpack_in_place(piece.extent, piece.target)
        elif piece.memory is None:
            parts += _slices(piece.extent, piece.target)
        else:
            in_place += _read_in_place(piece.extent, piece.memory)
    return in_place + list(_blocks(parts))


def _read_in_place(extent: Extent, memory: memoryview) -> Iterator[_DirectRead]:
    """Yield the aligned reads that fill ``memory``, which begins at the aligned offset before ``extent``."""
    start = align_down(extent.begin)
    for chunk in cut(extent, BLOCK_BYTES):
        yield _DirectRead(chunk, memory[chunk.offset - start : chunk.offset - start + chunk.length])


def _unpack_in_place(tensor: PackedTensor, target: torch.Tensor) -> Iterator[_FileRead]:
    """Yield the reads that unpack ``tensor`` into ``target``: its blocks on the host, else its pieces."""
    if target.is_cpu:
        place = np.frombuffer(byte_view(target), np.uint8)
        yield from (_BlockRead(tensor, block, place) for block in tensor.codec.blocks(tensor))
    else:
        flat = target.view(-1).view(torch.uint8)
        yield from (_PieceRead(part, flat[begin : begin + part.bytes]) for begin, part in in_pieces(tensor))


def _slices(extent: Extent, target: torch.Tensor) -> Iterator[_TensorSlice]:
    """Yield the parts of a tensor, none larger than a buffer."""
    flat, begin, dtype = target.view(-1), extent.begin, torch_dtype(extent.dtype)
    for chunk in cut(extent, BLOCK_BYTES):
        target = flat[(chunk.begin - begin) // dtype.itemsize : (chunk.end - begin) // dtype.itemsize]
        yield _TensorSlice(chunk.begin, chunk.end, target, dtype)


def _blocks(parts: Iterable[_TensorSlice]) -> Iterator[_Block]:
    """Yield neighbours together, as far as they fit in a buffer."""
    block: list[_TensorSlice] = []
    for part in sorted(parts, key=lambda part: part.begin):
        apart = block and part.begin - block[-1].end > GAP_BYTES
        if apart or (block and part.end - align_down(block[0].begin) > BLOCK_BYTES):
            yield _Block(block)
            block = []
        block.append(part)
    if block:
        yield _Block(block)


def can_be_cut(extent: Extent) -> bool:
    """Return whether no element lies across the border of two blocks: the tensor is aligned to its own elements."""
    return extent.begin % torch_dtype(extent.dtype).itemsize == 0


@contextmanager
def _opened(file: ShardFile) -> Iterator[_OpenFile]:
    with closing(DirectFile(file)) as opened:
        yield _OpenFile(file.path, opened, cached_pages(opened.descriptor, file.size))


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy and cast in this thread alone. On an accelerator it is there when this returns: the buffer is free again."""
    with alone():
        target.copy_(source)
