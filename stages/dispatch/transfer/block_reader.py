"""Packed tensors on their way: read block by block, and unpacked in the thread that read."""

from __future__ import annotations

from collections.abc import Iterable
from queue import SimpleQueue

from offstage.stages.checkpoints.packed import PackedBlock, PackedTensor
from offstage.stages.checkpoints.packed_reads import BlockAtOnce, bring_block, lent, read_at_once, room_at_rest
from offstage.stages.dispatch.transfer.chunk_reader import ChunkReader
from offstage.stages.machine.aligned_memory import Bytes, buffer_bytes
from offstage.stages.machine.probes import READING_THREADS

_MOST_KNOWN = 2048
"""Blocks of which is kept how they are brought, at some 2 KB each, which no budget counts. For others it is worked out
each time, in a tenth of the time that reading one takes.
"""


class BlockReader:
    """Brings blocks of packed ``tensors``, whose files ``reader`` has open.

    Each reading thread has a buffer while it brings one: as large as the largest block at rest.
    """

    def __init__(self, reader: ChunkReader, tensors: Iterable[PackedTensor]) -> None:
        self._reader = reader
        rooms = [room_at_rest(block) for tensor in tensors for block in tensor.codec.blocks(tensor)]
        self._buffers: SimpleQueue[Bytes] = SimpleQueue()
        for _ in range(READING_THREADS if rooms else 0):
            self._buffers.put(buffer_bytes(max(rooms)))
        self._known: dict[tuple[int, int], tuple[PackedTensor, BlockAtOnce | None]] = {}

    def bring(self, tensor: PackedTensor, block: PackedBlock, target: Bytes) -> int:
        """Read ``block`` and unpack it to its place in ``target``, the bytes of all of ``tensor``.

        Returns how many bytes were read.
        """
        reader = self._reader
        with lent(self._buffers) as buffer:
            known = self._at_once(tensor, block, target, buffer)
            if known is not None and reader.bring_at_once(known, buffer, target):
                return known.bytes
            small, direct = reader.read_small, reader.read
            return bring_block(tensor, block, target, buffer=buffer, small=small, direct=direct)

    def _at_once(self, tensor: PackedTensor, block: PackedBlock, target: Bytes, buffer: Bytes) -> BlockAtOnce | None:
        """Return how ``block`` is brought in one call of compiled code, where it can; worked out once for the first."""
        key = id(tensor), block.begin
        known = self._known.get(key)
        if known is None or known[0] is not tensor:  # held, so that no other one gets its number
            work = read_at_once(tensor, block, target, buffer=buffer, descriptor=self._reader.descriptor)
            if len(self._known) >= _MOST_KNOWN:
                return work
            known = self._known[key] = tensor, work
        return known[1]
