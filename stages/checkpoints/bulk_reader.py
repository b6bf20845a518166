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
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from queue import SimpleQueue
from types import TracebackType
from typing import Protocol

import numpy as np
import torch

from offstage.stages.checkpoints.direct_file import Chunk, cut
from offstage.stages.checkpoints.dtypes import torch_dtype
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.open_files import OpenFiles
from offstage.stages.checkpoints.packed import BLOCK_BYTES, AtRest, PackedBlock, PackedTensor, files_of, in_pieces
from offstage.stages.checkpoints.packed_reads import bring_block, lent, plan_at_once, room_at_rest
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.machine.aligned_memory import (
    TENSOR_ALIGNMENT,
    Bytes,
    align_down,
    byte_view,
    private_bytes,
    private_memory,
)
from offstage.stages.machine.devices import Devices
from offstage.stages.machine.operator_threads import alone
from offstage.stages.machine.probes import READING_THREADS
from offstage.stages.units import DeviceId

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


class _FileRead(Protocol):
    """A part of a file that is read at once."""

    def read(self, files: OpenFiles, buffers: SimpleQueue[mmap.mmap]) -> int:
        """Read it; return how many bytes of tensors that was."""


@dataclass(frozen=True, slots=True)
class _DirectRead:
    """A chunk of a tensor, read into ``target``: the aligned memory around where it stays."""

    chunk: Chunk
    target: memoryview

    def read(self, files: OpenFiles, buffers: SimpleQueue[mmap.mmap]) -> int:
        """Read from the page cache or directly: the bytes land where they stay."""
        files.read(self.chunk, self.target)
        return self.chunk.end - self.chunk.begin


@dataclass(frozen=True, slots=True)
class _TensorSlice:
    """A chunk of a tensor of ``dtype``, and the elements to fill with it."""

    chunk: Chunk
    target: torch.Tensor
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _BufferedRead:
    """Neighbouring ``slices`` of tensors, in the order of the file, and the ``chunk`` that has them all."""

    chunk: Chunk
    slices: list[_TensorSlice]

    def read(self, files: OpenFiles, buffers: SimpleQueue[mmap.mmap]) -> int:
        """Read straight from the page cache where nothing is cast, else by way of a buffer.

        On an accelerator it is there when this returns: the buffer is free again.
        """
        as_it_is = all(part.target.dtype == part.dtype and part.target.is_cpu for part in self.slices)
        if as_it_is and files.in_page_cache(self.chunk):
            for part in self.slices:
                span = Extent(self.chunk.file, part.chunk.begin, "uint8", (part.chunk.end - part.chunk.begin,))
                files.read_small(span, byte_view(part.target))
        else:
            with lent(buffers) as buffer, alone():
                files.read(self.chunk, memoryview(buffer)[: self.chunk.length])
                data = torch.frombuffer(buffer, dtype=torch.uint8)
                for part in self.slices:
                    begin, end = part.chunk.begin - self.chunk.offset, part.chunk.end - self.chunk.offset
                    part.target.copy_(data[begin:end].view(part.dtype))
        return sum(part.chunk.end - part.chunk.begin for part in self.slices)


@dataclass(frozen=True, slots=True)
class _BlockRead:
    """A block of a packed tensor, unpacked to its place in ``target``: the bytes of the whole tensor."""

    tensor: PackedTensor
    block: PackedBlock
    target: Bytes

    def read(self, files: OpenFiles, buffers: SimpleQueue[mmap.mmap]) -> int:
        """Read by way of a buffer, or of new memory where the block is larger than that; in one call where it can."""
        room = room_at_rest(self.block)
        with lent(buffers) as lent_buffer:
            buffer = np.frombuffer(lent_buffer, np.uint8) if room <= BLOCK_BYTES else private_bytes(room)
            known = plan_at_once(files, self.tensor, self.block, self.target, buffer=buffer)
            if known is not None and known.run(files, buffer, self.target):
                return known.bytes
            return bring_block(files, self.tensor, self.block, self.target, buffer=buffer)


@dataclass(frozen=True, slots=True)
class _PieceRead:
    """A packed tensor, or rows of one, that goes to an accelerator: ``target`` is its bytes there."""

    tensor: PackedTensor
    target: torch.Tensor

    def read(self, files: OpenFiles, buffers: SimpleQueue[mmap.mmap]) -> int:
        """Unpack on the host, and copy."""
        made = private_bytes(self.tensor.bytes)
        blocks = self.tensor.codec.blocks(self.tensor)
        count = sum(_BlockRead(self.tensor, block, made).read(files, buffers) for block in blocks)
        self.target.copy_(torch.from_numpy(made)[: self.tensor.bytes])
        return count


class BulkReader:
    """Reads pieces with ``READING_THREADS`` threads, each with a buffer of ``BLOCK_BYTES``; a context manager."""

    def __enter__(self) -> BulkReader:
        self._pool = ThreadPoolExecutor(READING_THREADS, thread_name_prefix="shard_load")
        self._buffers: SimpleQueue[mmap.mmap] = SimpleQueue()
        for _ in range(READING_THREADS):
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
        in_order = [sorted(pieces, key=lambda piece: piece.extent.begin) for pieces in by_file.values()]
        wanted = {file for pieces in in_order for piece in pieces for file in files_of(piece.extent)}
        futures: list[Future[int]] = []
        with closing(OpenFiles(wanted, once=True)) as files:
            try:
                for job in chain.from_iterable(map(_jobs, in_order)):
                    futures.append(self._pool.submit(job.read, files, self._buffers))
                for future in futures:
                    progress(future.result())
            finally:  # the first that fails cancels those that have not begun
                for future in futures:
                    future.cancel()
                wait(futures)  # before the files are closed: no thread reads one that isn't open


def _jobs(pieces: Iterable[TensorRead]) -> Iterator[_FileRead]:
    """Yield what is to be read of one file, whose ``pieces`` come in order."""
    slices: list[_TensorSlice] = []
    for piece in (piece for piece in pieces if piece.target.numel()):
        if isinstance(piece.extent, PackedTensor):
            yield from _unpack_in_place(piece.extent, piece.target)
        elif piece.memory is None:
            slices += _slices(piece.extent, piece.target)
        else:
            yield from _read_in_place(piece.extent, piece.memory)
    yield from _neighbours_together(slices)


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
        some = flat[(chunk.begin - begin) // dtype.itemsize : (chunk.end - begin) // dtype.itemsize]
        yield _TensorSlice(chunk, some, dtype)


def _neighbours_together(slices: Iterable[_TensorSlice]) -> Iterator[_BufferedRead]:
    """Yield the reads of ``slices``: of neighbours one, as far as they fit in a buffer."""
    found: list[_TensorSlice] = []
    for part in slices:
        first, last = (found[0].chunk, found[-1].chunk) if found else (part.chunk, part.chunk)
        if part.chunk.begin - last.end > GAP_BYTES or part.chunk.end - first.offset > BLOCK_BYTES:
            yield _buffered(found)
            found = []
        found.append(part)
    if found:
        yield _buffered(found)


def _buffered(slices: list[_TensorSlice]) -> _BufferedRead:
    first, last = slices[0].chunk, slices[-1].chunk
    return _BufferedRead(replace(first, end=last.end), slices)


def can_be_cut(extent: Extent) -> bool:
    """Return whether no element lies across the border of two blocks: the tensor is aligned to its own elements."""
    return extent.begin % torch_dtype(extent.dtype).itemsize == 0
