"""Reading packed tensors block by block, each unpacked in the thread that read it."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np

from offstage.pipeline.environment import allowed_cores
from offstage.stages.checkpoints.codecs.loops import LoopAfterReads, Read
from offstage.stages.checkpoints.direct_file import Chunk, whole
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.open_files import OpenFiles, Traced, untraced
from offstage.stages.checkpoints.packed import Codec, MemoryFile, PackedBlock, PackedTensor
from offstage.stages.checkpoints.shard_files import ShardFile, opened_shard, read_into
from offstage.stages.machine.aligned_memory import ALIGNMENT, Bytes, align_up, buffer_bytes
from offstage.stages.machine.probes import READERS, READING_THREADS

SMALL_SPAN_BYTES = 64 * 2**10
"""Smaller spans, such as scales, are read through the page cache: an aligned read brings more than is asked for."""

_UNPACKING = threading.BoundedSemaphore(min(READERS, len(allowed_cores())))

_MOST_KNOWN = 2048
"""Blocks of which is kept how they are brought, at some 2 KB each, which no budget counts. For others it is worked out
each time, in a tenth of the time that reading one takes.
"""


_NOTHING: Bytes = np.empty(0, np.uint8)


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


class ThreadBuffers:
    """A buffer of ``size`` bytes for each thread that reads.

    They lie side by side in one memory, so that those that are smaller than a huge page lie in some too. Where the size
    is 0, since all waits in memory as it rests, no memory is taken, and no thread waits for another's.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.renew()

    def renew(self) -> None:
        """Take other ones, as in a process that was forked, where no thread gives back what it was lent."""
        self._free: SimpleQueue[Bytes] = SimpleQueue()
        if not self.size:
            return
        apart = align_up(self.size)
        memory = buffer_bytes(READING_THREADS * apart)
        for begin in range(0, len(memory), apart):
            self._free.put(memory[begin : begin + self.size])

    @contextmanager
    def lend(self) -> Iterator[Bytes]:
        """Lend one, once there is one."""
        if not self.size:
            yield _NOTHING
            return
        buffer = self._free.get()
        try:
            yield buffer
        finally:
            self._free.put(buffer)


class FileReader(OpenFiles):
    """Reads ``files`` in any thread, each if it is what it was; what rests packed is unpacked as it comes.

    Each thread has one of ``buffers`` while it brings a block: they are as large as the largest one at rest.
    """

    def __init__(
        self, files: Iterable[ShardFile], buffers: ThreadBuffers, *, once: bool = False, traced: Traced = untraced
    ) -> None:
        super().__init__(files, once=once, traced=traced)
        self.buffers, self._most_known = buffers, 0 if once else _MOST_KNOWN
        self._known: dict[Hashable, tuple[Codec, BlockAtOnce | None]] = {}

    def start_anew(self) -> None:
        """Go on in a process that was forked."""
        self.buffers.renew()
        self._known = {}

    def unpack(self, tensor: PackedTensor, block: PackedBlock, target: Bytes) -> int:
        """Read ``block`` and unpack it to its place in ``target``, the bytes of all of ``tensor``.

        Returns how many bytes were read.
        """
        with self.buffers.lend() as buffer:
            at_once = self._at_once(tensor, block, target, buffer)
            if at_once is not None and at_once.run(self, buffer, target):
                return at_once.bytes
            data, count = read_block(self, block, buffer)
            unpack_block(tensor, block, data, target)
            return count

    def _at_once(self, tensor: PackedTensor, block: PackedBlock, target: Bytes, buffer: Bytes) -> BlockAtOnce | None:
        """Return how ``block`` is brought in one call of compiled code, where it can; worked out once for the first.

        Rows are made a tensor anew each time that they are brought, so blocks are known by what they are. A codec is
        one object in all rows of its tensor, and is held, so that no other one gets its number.
        """
        key = id(tensor.codec), block.spans, block.begin, tensor.dtype, tensor.shape
        entry = self._known.get(key)
        if entry is None:
            work = plan_at_once(self, tensor, block, target, buffer=buffer)
            if len(self._known) >= self._most_known:
                return work
            entry = self._known[key] = tensor.codec, work
        return entry[1]


def largest_at_rest(tensors: Iterable[PackedTensor]) -> int:
    """Return the room that the largest block of ``tensors`` takes at rest, in bytes; 0 where there is none."""
    return max((room_at_rest(block) for tensor in tensors for block in tensor.codec.blocks(tensor)), default=0)


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


def bytes_at(span: Extent) -> Bytes:
    """Return the bytes at ``span``: where they lie in memory, or read in this thread."""
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
