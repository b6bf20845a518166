"""Packed tensors on their way: read block by block, and unpacked in the thread that read."""

from __future__ import annotations

from collections.abc import Iterable
from queue import SimpleQueue

from stages.checkpoints.packed import PackedBlock, PackedTensor
from stages.checkpoints.packed_reads import bring_block, lent, room_at_rest
from stages.dispatch.transfer.carrier import ChunkReader
from stages.machine.aligned_memory import Bytes, buffer_bytes
from stages.machine.probes import READERS


class BlockReader:
    """Brings blocks of packed ``tensors``, whose files ``reader`` has open.

    Each reading thread has a buffer while it brings one: as large as the largest block at rest.
    """

    def __init__(self, reader: ChunkReader, tensors: Iterable[PackedTensor]) -> None:
        self._reader = reader
        rooms = [room_at_rest(block) for tensor in tensors for block in tensor.codec.blocks(tensor)]
        self.bytes = READERS * max(rooms, default=0)
        self._buffers: SimpleQueue[Bytes] = SimpleQueue()
        for _ in range(READERS if rooms else 0):
            self._buffers.put(buffer_bytes(max(rooms)))

    def bring(self, tensor: PackedTensor, block: PackedBlock, target: Bytes) -> int:
        """Read ``block`` and unpack it to its place in ``target``, the bytes of all of ``tensor``.

        Returns how many bytes were read.
        """
        small, direct = self._reader.read_small, self._reader.read
        with lent(self._buffers) as buffer:
            return bring_block(tensor, block, target, buffer=buffer, small=small, direct=direct)
