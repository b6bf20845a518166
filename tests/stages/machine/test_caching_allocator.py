"""The model of torch's allocator: segments, splitting, pools, and when an accelerator is out of memory."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from offstage.pipeline.errors import BudgetError
from offstage.stages.machine.caching_allocator import UNPACKING, Block, CachingAllocator, segment_bytes

MIB = 2**20


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_a_segment_is_as_large_as_its_first_block_asks(size: int, segment: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(size)
    assert allocator.reserved == segment == segment_bytes(size)


def test_blocks_are_rounded_up_and_a_large_rest_is_split_off_where_it_is_of_use() -> None:
    allocator = CachingAllocator()
    assert [allocator.allocate(size).size for size in (1, 512, 513)] == [512, 512, 1024]
    assert allocator.reserved == 2 * MIB
    assert allocator.allocate(33 * MIB).size == 34 * MIB, "a rest of 1 MiB stays with it"
    assert allocator.allocate(3 * MIB).size == 3 * MIB
    assert allocator.reserved == (2 + 34 + 20) * MIB
    assert allocator.allocate(17 * MIB - MIB // 2).begin == 39 * MIB, "in what was split off"
    assert allocator.allocated == 2048 + (34 + 20) * MIB


def test_what_is_freed_becomes_one_with_its_neighbours_and_the_smallest_that_fits_is_taken() -> None:
    allocator = CachingAllocator()
    first, second, third, _ = (allocator.allocate(5 * MIB) for _ in range(4))
    assert allocator.reserved == 20 * MIB
    for block in (first, third, second):
        allocator.free(block)
    assert allocator.allocate(9 * MIB).begin == first.begin
    assert allocator.reserved == 20 * MIB
    allocator.allocate(7 * MIB)
    assert allocator.reserved == 40 * MIB, "6 MiB are left there"


def test_a_stream_gets_nothing_of_anothers_pool() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(5 * MIB))
    allocator.allocate(5 * MIB, UNPACKING)
    assert allocator.reserved == 40 * MIB


def test_segments_that_nobody_uses_go_back_before_it_is_out_of_memory_and_no_others() -> None:
    allocator = CachingAllocator(capacity=45 * MIB)
    kept, idle = allocator.allocate(4 * MIB), allocator.allocate(22 * MIB)
    allocator.free(idle)
    assert (allocator.allocate(24 * MIB).size, allocator.reserved) == (24 * MIB, 44 * MIB)
    assert allocator.peak_reserved == 44 * MIB
    with pytest.raises(BudgetError, match=r"out of memory: .* reserved, .* in use"):
        allocator.allocate(17 * MIB)
    assert kept.size == 4 * MIB


@pytest.mark.parametrize("seed", range(4))
def test_blocks_in_use_never_overlap_and_all_that_is_freed_comes_back(seed: int) -> None:
    chance, allocator, blocks = random.Random(seed), CachingAllocator(), list[Block]()
    for _ in range(600):
        if blocks and chance.random() < 0.45:
            allocator.free(blocks.pop(chance.randrange(len(blocks))))
        else:
            blocks.append(
                allocator.allocate(chance.choice([700, 80_000, 900_000, 3 * MIB, 14 * MIB]), chance.choice([0, 1]))
            )
        spans = sorted((block.begin, block.begin + block.size) for block in blocks)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        assert allocator.allocated == sum(block.size for block in blocks) <= allocator.reserved
    for block in blocks:
        allocator.free(block)
    allocator.capacity = 0
    with pytest.raises(BudgetError):
        allocator.allocate(99 * MIB)
    assert allocator.reserved == allocator.allocated == 0, "free blocks of a segment are one again"
