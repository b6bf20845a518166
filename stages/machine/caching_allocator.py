"""What torch's caching allocator takes of an accelerator, by the rules of its ``CUDACachingAllocator``.

Torch takes memory of the driver in segments, and gives tensors blocks of them. A block has a multiple of 512 bytes.
Those of up to 1 MiB share segments of 2 MiB, those below 10 MiB segments of 20 MiB, and what is larger has a segment of
its own, of whole 2 MiB. The rest of a block is split off where it is of use: from 512 bytes on in a small segment,
beyond 1 MiB in a large one. Each stream has pools of its own, of which another gets nothing. Segments of which nothing
is in use go back to the driver only when it has no more.

So an accelerator may be full that holds less than it has. A plan counts by this model what is reserved beside what is
asked for, and a simulated accelerator what it would have reserved.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from offstage.pipeline.errors import BudgetError
from offstage.stages.units import format_bytes

BLOCK_BYTES = 512
SMALL_BYTES, SMALL_SEGMENT = 2**20, 2 * 2**20
"""The largest block that comes of a small segment, and what such a segment has."""
LARGE_SEGMENT, LEAST_OWN_SEGMENT = 20 * 2**20, 10 * 2**20
"""What a segment has that large blocks share, and from how many bytes on one has a segment of its own."""
_SEGMENT_STEP = 2 * 2**20

COMPUTING, UNPACKING = 0, 1
"""The streams for which memory is taken: that of a model's forward, and that of what is unpacked on the accelerator."""


Pool = tuple[int, bool]
"""The pool of a stream, for small blocks or for large ones."""


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment, of one ``pool``, and its neighbours there.

    One that isn't ``is_backed`` has addresses alone: it is neither in use nor free.
    """

    pool: Pool
    begin: int
    size: int
    is_free: bool = False
    is_backed: bool = True
    before: Block | None = field(default=None, repr=False)
    behind: Block | None = field(default=None, repr=False)


class CachingAllocator:
    """The allocator of an accelerator that gives at most ``capacity`` bytes; null is without limit.

    ``reserved`` are the bytes of its segments, ``allocated`` those of blocks in use; of both it keeps the peak.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.reserved = self.allocated = self.peak_reserved = self.peak_allocated = 0
        self._free: dict[Pool, list[tuple[int, int, Block]]] = {}  # by size, then by address
        self._end = 0

    def allocate(self, size: int, stream: int = COMPUTING) -> Block:
        """Return a block of ``size`` bytes for ``stream``; a ``BudgetError`` where torch would be out of memory."""
        rounded = max(BLOCK_BYTES, -(-size // BLOCK_BYTES) * BLOCK_BYTES)
        pool = (stream, rounded <= SMALL_BYTES)
        block = self._fitting(pool, rounded) or self._new_segment(pool, rounded)
        self._split(block, rounded)
        block.is_free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Take ``block`` back: what is free beside it becomes one with it."""
        self.allocated -= block.size
        self._join(block)

    def _join(self, block: Block) -> Block:
        """Have ``block`` be free, as one with what is free beside it; return all of that."""
        if block.behind is not None and block.behind.is_free:
            gone = block.behind
            self._forget(gone)
            block.size, block.behind = block.size + gone.size, gone.behind
        if block.before is not None and block.before.is_free:
            gone = block.before
            self._forget(gone)
            block.begin, block.size, block.before = gone.begin, block.size + gone.size, gone.before
        if block.before is not None:
            block.before.behind = block
        if block.behind is not None:
            block.behind.before = block
        self._keep(block)
        return block

    def has_free(self, size: int, stream: int = COMPUTING) -> bool:
        """Return whether ``stream`` has a free block of ``size`` bytes in the segments that are there."""
        blocks = self._free.get((stream, size <= SMALL_BYTES), [])
        return bool(blocks) and blocks[-1][0] >= size

    def _fitting(self, pool: Pool, size: int) -> Block | None:
        """Return the smallest free block of ``pool`` that has ``size`` bytes."""
        blocks = self._free.get(pool, [])
        place = bisect_left(blocks, (size,))
        return blocks.pop(place)[-1] if place < len(blocks) else None

    def _new_segment(self, pool: Pool, size: int) -> Block:
        """Return a segment for ``size`` bytes in one block, for which those go back that nobody uses if need be."""
        taken = segment_bytes(size)
        if self._is_short(taken):
            self._give_back()
            if self._is_short(taken):
                raise self._full(taken, size)
        self._reserve(taken)
        self._end += taken
        return Block(pool, self._end - taken, taken, is_free=True)

    def _is_short(self, taken: int) -> bool:
        return self.capacity is not None and self.reserved + taken > self.capacity

    def _full(self, taken: int, size: int) -> BudgetError:
        return BudgetError(
            f"an accelerator of {format_bytes(self.capacity or 0)} is out of memory: {format_bytes(self.reserved)}"
            f" are reserved, {format_bytes(self.allocated)} of them in use, and {format_bytes(taken)} more,"
            f" for {format_bytes(size)}, don't fit; give it {self.reserved + taken} bytes or more"
        )

    def _reserve(self, taken: int) -> None:
        self.reserved += taken
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _give_back(self) -> None:
        for pool, blocks in self._free.items():
            in_use = [entry for entry in blocks if entry[-1].before is not None or entry[-1].behind is not None]
            self.reserved -= sum(size for size, *_ in blocks) - sum(size for size, *_ in in_use)
            self._free[pool] = in_use

    def _split(self, block: Block, size: int) -> None:
        """Have ``block`` have ``size`` bytes, if what is left is of use."""
        if self._is_of_use(block, block.size - size):
            self._keep(self._cut(block, size))

    def _is_of_use(self, block: Block, left: int) -> bool:
        return left >= BLOCK_BYTES if block.pool[1] else left > SMALL_BYTES

    def _cut(self, block: Block, size: int) -> Block:
        """Have ``block`` have ``size`` bytes, and return what was behind them, which has memory as it has."""
        rest = Block(block.pool, block.begin + size, block.size - size, is_backed=block.is_backed)
        rest.before, rest.behind = block, block.behind
        if block.behind is not None:
            block.behind.before = rest
        block.size, block.behind = size, rest
        return rest

    def _keep(self, block: Block) -> None:
        block.is_free = True
        insort(self._free.setdefault(block.pool, []), (block.size, block.begin, block))

    def _forget(self, block: Block) -> None:
        blocks = self._free[block.pool]
        del blocks[bisect_left(blocks, (block.size, block.begin))]


def segment_bytes(size: int) -> int:
    """Return the bytes of the segment that is taken where no free block has ``size`` bytes."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < LEAST_OWN_SEGMENT else -(-size // _SEGMENT_STEP) * _SEGMENT_STEP
