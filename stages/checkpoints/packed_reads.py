"""Reading packed tensors: a block at a time, and whole in the thread that asks."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeVar

import numpy as np
import torch

from offstage.pipeline.environment import allowed_cores
from offstage.stages.checkpoints.codecs.loops import LoopAfterReads, Read
from offstage.stages.checkpoints.direct_file import Chunk, whole
from offstage.stages.checkpoints.dtypes import torch_dtype
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.open_files import OpenFiles
from offstage.stages.checkpoints.packed import MemoryFile, PackedBlock, PackedTensor
from offstage.stages.checkpoints.shard_files import ShardFile, opened_shard, read_into
from offstage.stages.machine.aligned_memory import ALIGNMENT, Bytes, align_up, byte_view, room_for
from offstage.stages.machine.probes import READERS, READING_THREADS

SMALL_SPAN_BYTES = 64 * 2**10
"""Smaller spans, such as scales, are read through the page cache: an aligned read brings more than is asked for."""

_UNPACKING = threading.BoundedSemaphore(min(READERS, len(allowed_cores())))

Buffer = TypeVar("Buffer")


@dataclass(frozen=True, slots=True)
class SpanRead:
    """A read that brings ``span`` into ``memory``, directly where there is a ``chunk``; ``data`` is the span's part."""

    span: Extent
    chunk: Chunk | None
    memory: Bytes
    data: Bytes

    @property
    def wanted(self) -> int:
        """How many bytes must be read."""
        return self.span.bytes if self.chunk is None else self.chunk.wanted


@dataclass(frozen=True, slots=True)
class BlockAtOnce:
    """How a block is read and unpacked in one call: so many ``bytes`` of ``files``.

    Any buffer and target will do that are as large as those that it was made for.
    """

    work: LoopAfterReads
    files: tuple[ShardFile, ...]
    bytes: int
    sizes: tuple[int, int]

    def run(self, files: OpenFiles, buffer: Bytes, target: Bytes) -> bool:
        """Read from ``files``, if they are what they were, and unpack; return false where a read failed."""
        assert (buffer.nbytes, target.nbytes) == self.sizes
        files.check(self.files)
        with files.traced("read and unpack", "read", bytes=self.bytes):
            return self.work.run(buffer.ctypes.data, target.ctypes.data)


def plan_at_once(
    files: OpenFiles, tensor: PackedTensor, block: PackedBlock, target: Bytes, *, buffer: Bytes
) -> BlockAtOnce | None:
    """Return how ``block`` is read into a buffer like ``buffer`` and unpacked to a target like ``target``.

    Null where there is no loop for it, or a part of it is in memory, or can't be read directly.
    """
    data, reads = _lay_out(block, buffer)
    opened = [files.descriptor(read.span.file, read.chunk) for read in reads]
    if len(reads) < len(block.spans) or None in opened:
        return None
    loop = tensor.codec.loop(tensor, block, data, target)
    if loop is None:
        return None
    first, rows = buffer.ctypes.data, []
    for file, read in zip(opened, reads, strict=True):
        offset, size = (read.span.begin, read.wanted) if read.chunk is None else (read.chunk.offset, read.chunk.length)
        rows.append(Read(file, offset, size, read.wanted, read.memory.ctypes.data - first))
    work = LoopAfterReads(loop, rows, at=(first, target.ctypes.data))
    read_from = tuple({read.span.file: None for read in reads})
    return BlockAtOnce(work, read_from, sum(read.wanted for read in reads), (buffer.nbytes, target.nbytes))


def room_at_rest(block: PackedBlock) -> int:
    """Return the aligned memory that ``block`` is read into, in bytes."""
    return sum(map(_room, block.spans))


def working_bytes(blocks: Iterable[PackedBlock], scratch_bytes: int) -> int:
    """Return what the threads take together at most that read ``blocks`` and unpack them, each with a scratch."""
    room = max((align_up(block.bytes) + ALIGNMENT for block in blocks), default=0)
    return READING_THREADS * room + READERS * scratch_bytes


@contextmanager
def lent(buffers: SimpleQueue[Buffer]) -> Iterator[Buffer]:
    """Lend one of ``buffers``, once there is one."""
    buffer = buffers.get()
    try:
        yield buffer
    finally:
        buffers.put(buffer)


def bring_block(files: OpenFiles, tensor: PackedTensor, block: PackedBlock, target: Bytes, *, buffer: Bytes) -> int:
    """Read ``block`` and unpack it to its place in ``target``, the bytes of all of ``tensor``.

    It is read into ``buffer``, which is aligned and has ``room_at_rest`` bytes at least. Returns how many bytes were
    read.
    """
    data, count = read_block(files, block, buffer)
    unpack_block(tensor, block, data, target)
    return count


def read_block(files: OpenFiles, block: PackedBlock, buffer: Bytes) -> tuple[list[Bytes], int]:
    """Return the bytes of the spans of ``block``, and how many were read: what isn't in memory, into ``buffer``."""
    data, reads = _lay_out(block, buffer)
    for read in reads:
        if read.chunk is None:
            files.read_small(read.span, read.data.data)
        else:
            files.read(read.chunk, read.memory.data)
    return data, sum(read.wanted for read in reads)


def _lay_out(block: PackedBlock, buffer: Bytes) -> tuple[list[Bytes], list[SpanRead]]:
    """Return where the bytes of the spans of ``block`` are, or will be once the reads into ``buffer`` are done."""
    data: list[Bytes] = []
    reads: list[SpanRead] = []
    begin = 0
    for span in block.spans:
        if isinstance(span.file, MemoryFile):
            data.append(span.file.bytes_of(span))
            continue
        memory = buffer[begin : begin + _room(span)]
        begin += len(memory)
        chunk = whole(span) if span.bytes >= SMALL_SPAN_BYTES else None
        data.append(memory[: span.bytes] if chunk is None else memory[chunk.skipped : chunk.wanted])
        reads.append(SpanRead(span, chunk, memory, data[-1]))
    return data, reads


def _room(span: Extent) -> int:
    if isinstance(span.file, MemoryFile):
        return 0
    return whole(span).length if span.bytes >= SMALL_SPAN_BYTES else align_up(span.bytes)


def unpack_block(tensor: PackedTensor, block: PackedBlock, data: Sequence[Bytes], target: Bytes) -> None:
    """Unpack ``block``, whose bytes are ``data``, to its place in ``target``: by a loop where there is one for it.

    Else by operators, as many at a time as there are cores. More of them would wait for each other, and each for
    Python's lock between two of its operators; a loop holds no lock.
    """
    loop = tensor.codec.loop(tensor, block, data, target)
    if loop is not None:
        loop.run()
        return
    with _UNPACKING:
        tensor.codec.unpack(tensor, block, data, target)


def read_packed(tensor: PackedTensor) -> torch.Tensor:
    """Return ``tensor`` as it is used, on the cpu, in new memory; read and unpacked block by block."""
    made = room_for(tensor.shape, torch_dtype(tensor.dtype)).tensor
    if made.numel():
        fill_packed(tensor, made)
    return made


def fill_packed(tensor: PackedTensor, target: torch.Tensor) -> None:
    """Read and unpack ``tensor`` into ``target``: contiguous, on the cpu, of its dtype and shape, not empty."""
    place = np.frombuffer(byte_view(target), np.uint8)
    for block in tensor.codec.blocks(tensor):
        unpack_block(tensor, block, [_bytes_of(span) for span in block.spans], place)


def _bytes_of(span: Extent) -> Bytes:
    if isinstance(span.file, MemoryFile):
        return span.file.bytes_of(span)
    data = np.empty(span.bytes, np.uint8)
    read_span(span, data.data)
    return data


def read_span(span: Extent, target: memoryview) -> None:
    """Fill ``target`` with the bytes at ``span``, through the page cache, if its file is what it was."""
    if isinstance(span.file, MemoryFile):
        target[:] = span.file.bytes_of(span).data
        return
    with opened_shard(span.file) as descriptor:
        read_into(descriptor, target, offset=span.begin, path=span.file.path)
