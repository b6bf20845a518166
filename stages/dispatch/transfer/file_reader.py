"""The files that streamed weights lie in, held open: read chunk by chunk, or block by block where they rest packed.

A packed block is unpacked in the thread that read it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from queue import SimpleQueue

from offstage.stages.checkpoints.open_files import OpenFiles, Traced, untraced
from offstage.stages.checkpoints.packed import Codec, PackedBlock, PackedTensor
from offstage.stages.checkpoints.packed_reads import BlockAtOnce, bring_block, lent, plan_at_once, room_at_rest
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.machine.aligned_memory import Bytes, buffer_bytes
from offstage.stages.machine.probes import READING_THREADS

_MOST_KNOWN = 2048
"""Blocks of which is kept how they are brought, at some 2 KB each, which no budget counts. For others it is worked out
each time, in a tenth of the time that reading one takes.
"""


class FileReader(OpenFiles):
    """Reads ``files`` in any thread, each if it is what it was; those of ``packed`` tensors are unpacked as they come.

    Each reading thread has a buffer while it brings a block: as large as the largest one at rest.
    """

    def __init__(
        self, files: Iterable[ShardFile], packed: Iterable[PackedTensor] = (), *, traced: Traced = untraced
    ) -> None:
        super().__init__(files, traced=traced)
        rooms = (room_at_rest(block) for tensor in packed for block in tensor.codec.blocks(tensor))
        self._largest = max(rooms, default=None)
        self.start_anew()

    def start_anew(self) -> None:
        """Have buffers of its own, also in a process that was forked, where no thread gives back what it was lent."""
        self._buffers: SimpleQueue[Bytes] = SimpleQueue()
        for _ in range(READING_THREADS if self._largest is not None else 0):
            self._buffers.put(buffer_bytes(self._largest or 0))
        self._known: dict[Hashable, tuple[Codec, BlockAtOnce | None]] = {}

    def unpack(self, tensor: PackedTensor, block: PackedBlock, target: Bytes) -> int:
        """Read ``block`` and unpack it to its place in ``target``, the bytes of all of ``tensor``.

        Returns how many bytes were read.
        """
        with lent(self._buffers) as buffer:
            known = self._at_once(tensor, block, target, buffer)
            if known is not None and known.run(self, buffer, target):
                return known.bytes
            return bring_block(self, tensor, block, target, buffer=buffer)

    def _at_once(self, tensor: PackedTensor, block: PackedBlock, target: Bytes, buffer: Bytes) -> BlockAtOnce | None:
        """Return how ``block`` is brought in one call of compiled code, where it can; worked out once for the first.

        Rows are made a tensor anew each time that they are brought, so blocks are known by what they are. A codec is
        one object in all rows of its tensor, and is held, so that no other one gets its number.
        """
        key = id(tensor.codec), block.spans, block.begin, tensor.dtype, tensor.shape
        known = self._known.get(key)
        if known is None:
            work = plan_at_once(self, tensor, block, target, buffer=buffer)
            if len(self._known) >= _MOST_KNOWN:
                return work
            known = self._known[key] = tensor.codec, work
        return known[1]
