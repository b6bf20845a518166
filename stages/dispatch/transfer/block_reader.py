"""Packed tensors on their way: read block by block, and unpacked in the thread that read."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from queue import SimpleQueue

from offstage.stages.checkpoints.open_files import OpenFiles
from offstage.stages.checkpoints.packed import Codec, PackedBlock, PackedTensor
from offstage.stages.checkpoints.packed_reads import BlockAtOnce, bring_block, lent, plan_at_once, room_at_rest
from offstage.stages.machine.aligned_memory import Bytes, buffer_bytes
from offstage.stages.machine.probes import READING_THREADS

_MOST_KNOWN = 2048
"""Blocks of which is kept how they are brought, at some 2 KB each, which no budget counts. For others it is worked out
each time, in a tenth of the time that reading one takes.
"""


class BlockReader:
    """Brings blocks of packed ``tensors``, whose ``files`` are open.

    Each reading thread has a buffer while it brings one: as large as the largest block at rest.
    """

    def __init__(self, files: OpenFiles, tensors: Iterable[PackedTensor]) -> None:
        self._files = files
        rooms = [room_at_rest(block) for tensor in tensors for block in tensor.codec.blocks(tensor)]
        self._buffers: SimpleQueue[Bytes] = SimpleQueue()
        for _ in range(READING_THREADS if rooms else 0):
            self._buffers.put(buffer_bytes(max(rooms)))
        self._known: dict[Hashable, tuple[Codec, BlockAtOnce | None]] = {}

    def bring(self, tensor: PackedTensor, block: PackedBlock, target: Bytes) -> int:
        """Read ``block`` and unpack it to its place in ``target``, the bytes of all of ``tensor``.

        Returns how many bytes were read.
        """
        with lent(self._buffers) as buffer:
            known = self._at_once(tensor, block, target, buffer)
            if known is not None and known.run(self._files, buffer, target):
                return known.bytes
            return bring_block(self._files, tensor, block, target, buffer=buffer)

    def _at_once(self, tensor: PackedTensor, block: PackedBlock, target: Bytes, buffer: Bytes) -> BlockAtOnce | None:
        """Return how ``block`` is brought in one call of compiled code, where it can; worked out once for the first.

        Rows are made a tensor anew each time that they are brought, so blocks are known by what they are. A codec is
        one object in all rows of its tensor, and is held, so that no other one gets its number.
        """
        key = id(tensor.codec), block.spans, block.begin, tensor.dtype, tensor.shape
        known = self._known.get(key)
        if known is None:
            work = plan_at_once(self._files, tensor, block, target, buffer=buffer)
            if len(self._known) >= _MOST_KNOWN:
                return work
            known = self._known[key] = tensor.codec, work
        return known[1]
