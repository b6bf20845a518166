"""What torch's allocator takes of an accelerator beside what is asked of it.

That is what blocks are rounded up by, what is left over in segments, and what the pool of one stream has that no other
gets.

Weights, reserve, slots and caches are taken one after the other by the allocator's own rules, each with its size. Of
activations no plan knows the sizes. Few of them always find a place in one segment, whatever their sizes are and the
order in which they come and go: that follows from the rules. Beside the segments that more of them fill there are some
that they fill in part, as simulated generations were seen to need.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from offstage.stages.machine.caching_allocator import (
    BLOCK_BYTES,
    COMPUTING,
    LARGE_SEGMENT,
    SMALL_BYTES,
    SMALL_SEGMENT,
    UNPACKING,
    CachingAllocator,
)
from offstage.stages.machine.expandable_segments import caching_allocator
from offstage.stages.plan.layout import Layout
from offstage.stages.plan.memory_needs import COPIES, BlockCache, MemoryNeeds
from offstage.stages.plan.outline import Outline
from offstage.stages.units import DeviceId

_IN_PART = 2
"""The segments of a size that activations fill in part: the last one, and that of what is freed and taken again."""

Asked = tuple[int, int]
"""So many bytes, asked for by a stream."""


def reserved_beside(asked: Iterable[Asked], activation_bytes: int, *, expands: bool) -> int:
    """Return what is reserved beyond the bytes that are ``asked`` for, one after the other, and those of activations.

    ``expands`` says whether segments do.

    >>> reserved_beside([(3 * 2**20, COMPUTING)], 0, expands=False) // 2**20
    17
    """
    allocator, wanted = caching_allocator(expands=expands), 0
    for size, stream in asked:
        if size:
            allocator.allocate(size, stream)
            wanted += size
    in_part = min(1, activation_bytes) * _IN_PART * SMALL_SEGMENT + _large_in_part(allocator, activation_bytes)
    return allocator.reserved - wanted + in_part


def _large_in_part(allocator: CachingAllocator, activation_bytes: int) -> int:
    """Return what is reserved for the large blocks of activations beside their bytes, ``allocator`` having all else.

    Few of them share one segment, or what weights have left of one.
    """
    if activation_bytes <= SMALL_BYTES:
        return 0
    room = piece_for(activation_bytes)
    if room > LARGE_SEGMENT:
        return _IN_PART * LARGE_SEGMENT
    return 0 if allocator.has_free(room, COMPUTING) else LARGE_SEGMENT


def piece_for(count: int) -> int:
    """Return the bytes of a piece of memory in which each large block finds a place, whatever came and went before it,
    while blocks have ``count`` bytes at once at the most.

    Where it finds none, each gap between those that are in use is smaller than it. So many blocks leave one gap more at
    the most, and each of them may have a rest that is too small to be split off. As each has more than 1 MiB, there
    are few.

    >>> piece_for(2 * 2**20) // 2**20, piece_for(4 * 2**20) // 2**20
    (2, 9)
    """
    room = count
    least = SMALL_BYTES + BLOCK_BYTES
    for in_use in range(1, count // least):
        size = count - in_use * least  # of the one that comes: the larger it is, the more the gaps can have
        room = max(room, in_use * (least + SMALL_BYTES) + (in_use + 1) * (size - BLOCK_BYTES) + BLOCK_BYTES)
    return room


def allocator_bytes(
    layout: Layout, device: DeviceId, *, caches: Iterable[BlockCache], activation_bytes: int, expands: bool
) -> int:
    """Return what the accelerator ``device`` has reserved at its peak beyond what its ledger counts, in bytes.

    ``caches`` are those of the blocks that it computes, and ``expands`` says whether its segments do.
    """
    room = layout.rooms[device]
    asked = [(line.bytes, COMPUTING) for line in layout.lines if line.home == device and line.name == line.leader]
    asked += [(room.reserve, COMPUTING), (room.expert_cache, COMPUTING), (room.dequantising, COMPUTING)]
    asked += _tensors(caches)
    return reserved_beside([*asked, *_in_pool_apart(room.dequantising)], activation_bytes, expands=expands)


def _tensors(caches: Iterable[BlockCache]) -> list[Asked]:
    """Return the tensors of ``caches`` that lie where their blocks compute: of what waits on the host the largest."""
    tensors, passing = list[Asked](), 0
    for cache in caches:
        if cache.waits:
            passing = max(passing, cache.most)
        else:
            tensors += [(cache.most // cache.tensors, COMPUTING)] * cache.tensors
    return [*tensors, *[(passing, COMPUTING)] * COPIES]


def _in_pool_apart(unpacking: int) -> list[Asked]:
    """Return what segments the pool of the stream takes that unpacks: temporaries of both sizes, in part."""
    return [(1, UNPACKING), *([(SMALL_BYTES + 1, UNPACKING)] if unpacking > SMALL_BYTES else [])] if unpacking else []


@dataclass(frozen=True, slots=True)
class AllocatorCost:
    """What torch's allocator takes beside a model's weights: ``fixed`` bytes, and a ``share`` of each byte of them.

    Beside all of them it takes ``whole``.
    """

    fixed: int = 0
    share: float = 0.0
    whole: int = 0

    def beside(self, weights: int) -> int:
        """Return what it takes beside so many bytes of weights."""
        return self.fixed + min(self.whole, round(self.share * max(0, weights)))

    def within(self, room: int) -> int:
        """Return what of ``room`` it takes where weights fill the rest."""
        left = max(0, room - self.fixed)
        return self.fixed + min(self.whole, round(left * self.share / (1 + self.share)))


def allocator_cost(outline: Outline, needs: MemoryNeeds, *, expands: bool) -> AllocatorCost:
    """Return what torch's allocator takes beside weights of the model, and beside a request that ``needs`` so much."""
    sizes = [(outline.sizes[spec.name], COMPUTING) for spec in outline.skeleton.unique]
    weights = sum(size for size, _ in sizes)
    whole = reserved_beside(sizes, 0, expands=expands)
    fixed = reserved_beside(_tensors(needs.caches), needs.activation_bytes, expands=expands)
    return AllocatorCost(fixed, whole / max(1, weights), whole)
