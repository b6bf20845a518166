"""Reading many tensors at the speed of the storage: large aligned reads, several in flight.

What the page cache holds is copied from there, straight into the tensors. All else is read directly (``O_DIRECT``),
since the page cache would only hold a second copy of weights that are in memory already. A tensor whose memory is laid
out for it (``TensorRoom``) is read into in place, and a small one through the page cache. Others, such as must be cast,
come by way of an aligned buffer; so does what rests packed, and the thread that read it unpacks it to where it stays.
So the memory held is that of the tensors and the few buffers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import TracebackType

import numpy as np
import torch

from offstage.stages.checkpoints.direct_file import Chunk, cut, whole
from offstage.stages.checkpoints.dtypes import torch_dtype
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.packed import BLOCK_BYTES, AtRest, PackedBlock, PackedTensor, files_of, in_pieces
from offstage.stages.checkpoints.packed_reads import SMALL_SPAN_BYTES, FileReader, ThreadBuffers, largest_at_rest
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.machine.aligned_memory import TENSOR_ALIGNMENT, Bytes, align_down, byte_view, private_bytes
from offstage.stages.machine.devices import Devices
from offstage.stages.machine.operator_threads import alone
from offstage.stages.machine.probes import READING_THREADS
from offstage.stages.units import DeviceId

_OPEN_FILES = 64
_TOGETHER = 64
"""Small tensors that one thread reads before it takes others."""


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


Job = Callable[[FileReader], int]
"""Reads a part of a file; returns how many bytes of tensors that was."""


def _read_directly(chunk: Chunk, target: memoryview, files: FileReader) -> int:
    """Read a chunk of a tensor from the page cache or directly, into the aligned memory around where it stays."""
    files.read(chunk, target)
    return chunk.end - chunk.begin


def _read_by_buffer(chunk: Chunk, target: torch.Tensor, dtype: torch.dtype, files: FileReader) -> int:
    """Read a chunk of a tensor of ``dtype``, the elements ``target``: by way of a buffer, or straight from the page
    cache where nothing is cast.

    On an accelerator it is there when this returns: the buffer is free again.
    """
    size = chunk.end - chunk.begin
    if target.dtype == dtype and target.is_cpu and files.in_page_cache(chunk):
        files.read_small(Extent(chunk.file, chunk.begin, "uint8", (size,)), byte_view(target))
    else:
        with files.buffers.lend() as buffer, alone():
            files.read(chunk, buffer.data[: chunk.length])
            target.copy_(torch.from_numpy(buffer)[chunk.skipped : chunk.wanted].view(dtype))
    return size


def _read_small(wanted: Sequence[tuple[Extent, torch.Tensor]], files: FileReader) -> int:
    """Read small tensors one after the other, through the page cache: neighbours come together there."""
    with alone():
        for extent, target in wanted:
            dtype = torch_dtype(extent.dtype)
            data = target if target.dtype == dtype and target.is_cpu else torch.empty(target.shape, dtype=dtype)
            files.read_small(extent, byte_view(data))
            if data is not target:
                target.copy_(data)
    return sum(extent.bytes for extent, _ in wanted)


def _unpack_here(tensor: PackedTensor, block: PackedBlock, target: Bytes, files: FileReader) -> int:
    """Read a block of a packed tensor and unpack it to its place in ``target``: the bytes of the whole tensor."""
    return files.unpack(tensor, block, target)


def _unpack_and_copy(tensor: PackedTensor, target: torch.Tensor, files: FileReader) -> int:
    """Unpack a packed tensor, or rows of one, on the host, and copy it to an accelerator: its bytes there."""
    unpacked = private_bytes(tensor.bytes)
    count = sum(files.unpack(tensor, block, unpacked) for block in tensor.codec.blocks(tensor))
    target.copy_(torch.from_numpy(unpacked)[: tensor.bytes])
    return count


class BulkReader:
    """Reads pieces with ``READING_THREADS`` threads, a buffer for each as large as what it reads; a context manager."""

    def __enter__(self) -> BulkReader:
        self._pool = ThreadPoolExecutor(READING_THREADS, thread_name_prefix="shard_load")
        self._buffers = ThreadBuffers(0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)

    def read(self, pieces: Iterable[TensorRead], progress: Callable[[int], object]) -> None:
        """Fill the targets of ``pieces``, in the order in which they lie in their files.

        ``progress`` is called with the bytes of each block that was read.
        """
        by_file: dict[ShardFile, list[TensorRead]] = defaultdict(list)
        for piece in pieces:
            if piece.target.numel():
                by_file[piece.extent.file].append(piece)
        files = list(by_file)
        for start in range(0, len(files), _OPEN_FILES):
            chosen = (by_file[file] for file in files[start : start + _OPEN_FILES])
            self._read_all(list(chain.from_iterable(sorted(some, key=_begin) for some in chosen)), progress)

    def _read_all(self, pieces: Sequence[TensorRead], progress: Callable[[int], object]) -> None:
        """Read ``pieces`` of a few files, in this order."""
        wanted = {file for piece in pieces for file in files_of(piece.extent)}
        largest = max(map(_buffered_bytes, pieces), default=0)
        if largest > self._buffers.size:
            self._buffers = ThreadBuffers(largest)
        futures: list[Future[int]] = []
        with closing(FileReader(wanted, self._buffers, once=True)) as files:
            try:
                for job in _jobs(pieces):
                    futures.append(self._pool.submit(job, files))
                for future in futures:
                    progress(future.result())
            finally:  # the first that fails cancels those that have not begun
                for future in futures:
                    future.cancel()
                wait(futures)  # before the files are closed: no thread reads one that isn't open


def _begin(piece: TensorRead) -> int:
    return piece.extent.begin


def _buffered_bytes(piece: TensorRead) -> int:
    """Return the most of ``piece`` that is in a buffer at a time."""
    if isinstance(piece.extent, PackedTensor):
        return largest_at_rest([piece.extent])
    return 0 if piece.memory is not None else min(BLOCK_BYTES, whole(piece.extent).length)


def _jobs(pieces: Iterable[TensorRead]) -> Iterator[Job]:
    """Yield what reads ``pieces``, the small ones last."""
    small: list[tuple[Extent, torch.Tensor]] = []
    for piece in pieces:
        if isinstance(piece.extent, PackedTensor):
            yield from _unpacking(piece.extent, piece.target)
        elif piece.memory is None and piece.extent.bytes < SMALL_SPAN_BYTES:
            small.append((piece.extent, piece.target))
        else:
            yield from _reading(piece.extent, piece.target, piece.memory)
    for begin in range(0, len(small), _TOGETHER):
        yield partial(_read_small, small[begin : begin + _TOGETHER])


def _unpacking(tensor: PackedTensor, target: torch.Tensor) -> Iterator[Job]:
    """Yield what unpacks ``tensor`` into ``target``: its blocks on the host, else its pieces."""
    if target.is_cpu:
        place = np.frombuffer(byte_view(target), np.uint8)
        yield from (partial(_unpack_here, tensor, block, place) for block in tensor.codec.blocks(tensor))
    else:
        flat = target.view(-1).view(torch.uint8)
        yield from (partial(_unpack_and_copy, part, flat[at : at + part.bytes]) for at, part in in_pieces(tensor))


def _reading(extent: Extent, target: torch.Tensor, memory: memoryview | None) -> Iterator[Job]:
    """Yield the aligned reads that fill ``target``: in place where there is ``memory`` around it, else by a buffer."""
    start, flat, dtype = align_down(extent.begin), target.view(-1), torch_dtype(extent.dtype)
    for chunk in cut(extent, BLOCK_BYTES):
        if memory is not None:
            yield partial(_read_directly, chunk, memory[chunk.offset - start : chunk.offset - start + chunk.length])
        else:
            begin, end = ((at - extent.begin) // dtype.itemsize for at in (chunk.begin, chunk.end))
            yield partial(_read_by_buffer, chunk, flat[begin:end], dtype)


def can_be_cut(extent: Extent) -> bool:
    """Return whether no element lies across the border of two blocks: the tensor is aligned to its own elements."""
    return extent.begin % torch_dtype(extent.dtype).itemsize == 0
