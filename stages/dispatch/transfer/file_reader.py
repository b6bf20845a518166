"""The files that streamed weights lie in, held open: read chunk by chunk, or block by block where they rest packed.

A packed block is unpacked in the thread that read it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from queue import SimpleQueue

from offstage.stages.checkpoints.direct_file import Chunk, DirectFile
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.packed import PackedBlock, PackedTensor
from offstage.stages.checkpoints.packed_reads import (
    BlockAtOnce,
    SpanRead,
    bring_block,
    lent,
    read_at_once,
    room_at_rest,
)
from offstage.stages.checkpoints.shard_files import ShardFile, read_into
from offstage.stages.dispatch.transfer.trace import Trace
from offstage.stages.machine.aligned_memory import Bytes, buffer_bytes
from offstage.stages.machine.probes import READING_THREADS

_MOST_KNOWN = 2048
"""Blocks of which is kept how they are brought, at some 2 KB each, which no budget counts. For others it is worked out
each time, in a tenth of the time that reading one takes.
"""


class FileReader:
    """Reads ``files`` in any thread, each if it is what it was; those of ``packed`` tensors are unpacked as they come.

    Each reading thread has a buffer while it brings a block: as large as the largest one at rest.
    """

    def __init__(
        self, files: Iterable[ShardFile], packed: Iterable[PackedTensor] = (), trace: Trace | None = None
    ) -> None:
        self._files = {file: DirectFile(file) for file in files}
        self._trace = trace
        rooms = (room_at_rest(block) for tensor in packed for block in tensor.codec.blocks(tensor))
        self._largest = max(rooms, default=None)
        self.start_anew()

    def start_anew(self) -> None:
        """Have buffers of its own, also in a process that was forked, where no thread gives back what it was lent."""
        self._buffers: SimpleQueue[Bytes] = SimpleQueue()
        for _ in range(READING_THREADS if self._largest is not None else 0):
            self._buffers.put(buffer_bytes(self._largest or 0))
        self._known: dict[tuple[int, int], tuple[PackedTensor, BlockAtOnce | None]] = {}

    def read(self, chunk: Chunk, target: memoryview) -> int:
        """Read ``chunk`` into ``target`` (aligned, ``chunk.length`` bytes); return how many bytes were wanted."""
        file = self._files[chunk.file]
        file.check()
        with (
            self._trace.span("read", "read", bytes=chunk.wanted, offset=chunk.offset) if self._trace else nullcontext()
        ):
            return file.read(target, offset=chunk.offset, wanted=chunk.wanted)

    def read_small(self, span: Extent, target: memoryview) -> None:
        """Fill ``target`` with the bytes at ``span``, through the page cache."""
        file = self._files[span.file]
        file.check()
        read_into(file.descriptor, target, offset=span.begin, path=span.file.path)

    def unpack(self, tensor: PackedTensor, block: PackedBlock, target: Bytes) -> int:
        """Read ``block`` and unpack it to its place in ``target``, the bytes of all of ``tensor``.

        Returns how many bytes were read.
        """
        with lent(self._buffers) as buffer:
            known = self._at_once(tensor, block, target, buffer)
            if known is not None and self._run(known, buffer, target):
                return known.bytes
            return bring_block(tensor, block, target, buffer=buffer, small=self.read_small, direct=self.read)

    def _at_once(self, tensor: PackedTensor, block: PackedBlock, target: Bytes, buffer: Bytes) -> BlockAtOnce | None:
        """Return how ``block`` is brought in one call of compiled code, where it can; worked out once for the first."""
        key = id(tensor), block.begin
        known = self._known.get(key)
        if known is None or known[0] is not tensor:  # held, so that no other one gets its number
            work = read_at_once(tensor, block, target, buffer=buffer, descriptor=self._descriptor)
            if len(self._known) >= _MOST_KNOWN:
                return work
            known = self._known[key] = tensor, work
        return known[1]

    def _descriptor(self, read: SpanRead) -> int | None:
        """Return what the file of ``read`` is open as; null where it can't be read directly as it should."""
        file = self._files[read.span.file]
        return file.descriptor if read.chunk is None else file.direct_descriptor

    def _run(self, block: BlockAtOnce, buffer: Bytes, target: Bytes) -> bool:
        """Read ``block`` into ``buffer`` and unpack it to ``target``; return false where a read failed."""
        for file in block.files:
            self._files[file].check()
        with self._trace.span("read and unpack", "read", bytes=block.bytes) if self._trace else nullcontext():
            return block.run(buffer, target)

    def close(self) -> None:
        """Close the files; closing again does nothing."""
        for file in self._files.values():
            file.close()
