"""From storage to the host: parts are read, or unpacked, straight into the memory in which the host uses them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import torch

from offstage.stages.checkpoints.direct_file import Chunk
from offstage.stages.checkpoints.packed import AtRest, PackedBlock, PackedTensor, files_of
from offstage.stages.dispatch.transfer.arena import Arena, HostMemory
from offstage.stages.dispatch.transfer.block_reader import BlockReader
from offstage.stages.dispatch.transfer.carrier import SMALL_BYTES, ChunkReader, Delivery, Traffic, reader_pool
from offstage.stages.dispatch.transfer.part_layout import lay_out_reads
from offstage.stages.dispatch.transfer.staging import Staging
from offstage.stages.dispatch.transfer.trace import Trace
from offstage.stages.machine.aligned_memory import ALIGNMENT, Bytes, align_up, private_bytes, tensor_in

SMALL_ARENA_BYTES = 2**20
ALIGNED_TENSORS = 32
"""Tensors on their way at once that the staging memory has alignment to spare for."""

Read = TypeVar("Read")
Target = TypeVar("Target", memoryview, Bytes)


class HostCarrier:
    """Brings parts that lie at the places ``parts`` into staging memory of ``staging_bytes`` on the host.

    Which of them a pass uses is certain, but for groups that are ``optional``; ``callers`` has the modules whose calls
    use each.
    """

    def __init__(
        self,
        parts: Sequence[Sequence[AtRest]],
        *,
        staging_bytes: int,
        traffic: Traffic,
        optional: Sequence[Sequence[int]] = (),
        callers: Mapping[int, Collection[str]] | None = None,
        trace: Trace | None = None,
    ) -> None:
        self._layouts = [lay_out_reads(sources) for sources in parts]
        self._chunks = [layout.chunks() for layout in self._layouts]
        self.sizes = [layout.size for layout in self._layouts]
        self.streamed = self.carried = [layout.rest_bytes for layout in self._layouts]
        options = {part for group in optional for part in group}
        small = {part for part, size in enumerate(self.sizes) if size <= SMALL_BYTES and part not in options}
        self._small_parts, self._optional = small, optional
        self._callers = {part: names for part, names in (callers or {}).items() if part not in small}
        self._room = staging_bytes + 2 * ALIGNMENT * min(sum(map(len, parts)), ALIGNED_TENSORS)
        self._traffic = traffic
        sources = [source for part in parts for source in part]
        self._packed = [source for source in sources if isinstance(source, PackedTensor)]
        self._reader = ChunkReader({file for source in sources for file in files_of(source)}, trace)
        self._take_memory()

    def _take_memory(self) -> None:
        """Take the memory that is lent: the staging memory, that of small parts, and what packed blocks are read to."""
        small = self._small_parts
        large = [0 if part in small else size for part, size in enumerate(self.sizes)]
        self._staging = Staging(
            HostMemory,
            large,
            optional=self._optional,
            callers=self._callers,
            room=self._room,
            alignment=ALIGNMENT,
        )
        self._small = Arena(HostMemory(min(SMALL_ARENA_BYTES, sum(self.sizes[part] for part in small))))
        self._blocks = BlockReader(self._reader, self._packed)

    def start_anew(self) -> bool:
        """Take memory of its own: threads of the process that this one was forked from hold some for ever."""
        self._take_memory()
        return True

    @property
    def kept(self) -> Collection[int]:
        """The optional parts, where they have memory of their own."""
        return self._staging.kept

    def take(self, part: int, *, ahead: bool = False, anywhere: bool = False) -> Bytes | None:
        """Return memory for ``part``, or null if there is none free; small parts have an arena of their own."""
        if part in self._small_parts:
            return self._small.take(self.sizes[part])
        return self._staging.take(part, ahead=ahead, anywhere=anywhere)

    def beyond(self, part: int) -> Bytes:
        """Return new memory for ``part``."""
        return private_bytes(align_up(self.sizes[part]))

    def bring(self, part: int, delivery: Delivery[Bytes]) -> None:
        """Start the reads that fill the region with ``part``."""
        assert delivery.region is not None
        data = delivery.region.data
        for chunk, begin in self._chunks[part]:
            _submit(delivery, self._read, chunk, [data[begin - chunk.skipped :][: chunk.length]])
        for piece in self._layouts[part].packed:
            target = delivery.region[piece.begin : piece.begin + piece.bytes]
            for block in piece.source.codec.blocks(piece.source):
                _submit(delivery, self._unpack, (piece.source, block), [target])

    def _read(self, chunk: Chunk, target: list[memoryview]) -> int:
        """Read ``chunk`` into what ``target`` holds. Once that is done nothing here holds the region any more."""
        return self._reader.read(chunk, target.pop())

    def _unpack(self, what: tuple[PackedTensor, PackedBlock], target: list[Bytes]) -> int:
        """Read a block and unpack it into what ``target`` holds, the bytes of its tensor."""
        return self._blocks.bring(*what, target.pop())

    def abandon(self, arrived: Iterable[Future[Any]]) -> None:
        """Count what was read; nothing of it is under way any more."""
        self._traffic.storage_bytes += sum(read.result() for read in arrived)

    def wait(self, delivery: Delivery[Bytes]) -> None:
        """Wait for the reads."""
        self.abandon(delivery.arriving)

    def views(self, part: int, delivery: Delivery[Bytes]) -> list[torch.Tensor]:
        """Return the tensors of ``part``, in the order of its extents."""
        assert delivery.region is not None
        region = delivery.region
        return [tensor_in(region, piece.begin, piece.dtype, piece.source.shape) for piece in self._layouts[part].pieces]

    def close(self) -> None:
        """Close the files; closing again does nothing."""
        self._reader.close()


def _submit(
    delivery: Delivery[Bytes], work: Callable[[Read, list[Target]], int], what: Read, target: list[Target]
) -> None:
    """Have a thread of the pool do ``work``, as a part of ``delivery``."""
    read = reader_pool().submit(work, what, target)
    read.add_done_callback(partial(_forget, target))
    delivery.arriving.append(read)


def _forget(target: list[Target], _read: Future[int]) -> None:
    """Let go of the memory of a read that was cancelled, which goes on waiting in the queue of the pool."""
    target.clear()
