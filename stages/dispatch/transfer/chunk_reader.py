"""The files that streamed weights lie in, held open and read chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

from offstage.stages.checkpoints.direct_file import Chunk, DirectFile
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.packed_reads import BlockAtOnce, SpanRead
from offstage.stages.checkpoints.shard_files import ShardFile, read_into
from offstage.stages.dispatch.transfer.trace import Trace
from offstage.stages.machine.aligned_memory import Bytes


class ChunkReader:
    """The ``files`` of some parts, held open to be read chunk by chunk, in any thread."""

    def __init__(self, files: Iterable[ShardFile], trace: Trace | None) -> None:
        self._files = {file: DirectFile(file) for file in files}
        self._trace = trace

    def read(self, chunk: Chunk, target: memoryview) -> int:
        """Read ``chunk`` into ``target`` (aligned, ``chunk.length`` bytes), if its file is what it was; return how many
        bytes were wanted.
        """
        file = self._files[chunk.file]
        file.check()
        with (
            self._trace.span("read", "read", bytes=chunk.wanted, offset=chunk.offset) if self._trace else nullcontext()
        ):
            return file.read(target, offset=chunk.offset, wanted=chunk.wanted)

    def read_small(self, span: Extent, target: memoryview) -> None:
        """Fill ``target`` with the bytes at ``span``, through the page cache, if its file is what it was."""
        file = self._files[span.file]
        file.check()
        read_into(file.descriptor, target, offset=span.begin, path=span.file.path)

    def descriptor(self, read: SpanRead) -> int | None:
        """Return what the file of ``read`` is open as; null where it can't be read directly as it should."""
        file = self._files[read.span.file]
        return file.descriptor if read.chunk is None else file.direct_descriptor

    def bring_at_once(self, block: BlockAtOnce, buffer: Bytes, target: Bytes) -> bool:
        """Read ``block`` into ``buffer`` and unpack it to ``target``, if its files are what they were; return false
        where a read failed.
        """
        for file in block.files:
            self._files[file].check()
        with self._trace.span("read and unpack", "read", bytes=block.bytes) if self._trace else nullcontext():
            return block.run(buffer, target)

    def close(self) -> None:
        """Close the files; closing again does nothing."""
        for file in self._files.values():
            file.close()
