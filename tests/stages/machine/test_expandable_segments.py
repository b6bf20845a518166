"""The model of torch's allocator with segments that expand, and where they are turned on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest

from offstage.pipeline.environment import ALLOCATOR_SETTINGS
from offstage.pipeline.errors import BudgetError
from offstage.stages.machine import expandable_segments
from offstage.stages.machine.caching_allocator import UNPACKING, Block, CachingAllocator
from offstage.stages.machine.expandable_segments import (
    SETTING,
    ExpandableAllocator,
    are_on,
    caching_allocator,
    turn_on,
    would_expand,
)

MIB = 2**20


def test_a_pool_has_one_segment_that_grows_by_pages() -> None:
    allocator = ExpandableAllocator()
    allocator.allocate(33 * MIB)
    assert allocator.reserved == 40 * MIB, "two pages"
    assert allocator.allocate(6 * MIB).begin == 33 * MIB
    assert allocator.allocate(2 * MIB).begin == 39 * MIB, "it begins in what is left, and the rest is behind"
    assert allocator.reserved == 60 * MIB
    allocator.allocate(700)
    allocator.allocate(5 * MIB, UNPACKING)
    assert allocator.reserved == (60 + 2 + 20) * MIB


def test_a_block_that_is_freed_last_grows_to_a_larger_one_where_other_segments_would_be_one_more() -> None:
    for allocator, reserved in ((ExpandableAllocator(), 60 * MIB), (CachingAllocator(), 102 * MIB)):
        allocator.free(allocator.allocate(50 * MIB))
        allocator.allocate(52 * MIB)
        assert allocator.reserved == reserved


def test_the_smallest_that_fits_is_taken_before_the_one_that_could_grow() -> None:
    allocator = ExpandableAllocator()
    first, _ = allocator.allocate(30 * MIB), allocator.allocate(2 * MIB)
    allocator.free(first)
    assert allocator.allocate(7 * MIB).begin == first.begin, "8 MiB are left at the end, and 30 before it"


def test_whole_pages_go_back_before_it_is_out_of_memory_and_are_the_first_that_come_again() -> None:
    allocator = ExpandableAllocator(capacity=100 * MIB)
    first, kept = allocator.allocate(50 * MIB), allocator.allocate(10 * MIB)
    allocator.free(first)
    assert allocator.allocate(70 * MIB).begin == 60 * MIB
    assert allocator.reserved == 100 * MIB, "10 of 50 MiB are of a page that is in use"
    with pytest.raises(BudgetError, match=r"out of memory: .* reserved, .* in use"):
        allocator.allocate(70 * MIB)
    assert allocator.allocate(9 * MIB).begin == 40 * MIB
    assert kept.begin == 50 * MIB


@pytest.mark.parametrize("seed", range(4))
def test_blocks_in_use_never_overlap_have_memory_and_all_that_is_freed_comes_back(seed: int) -> None:
    chance, allocator, blocks = random.Random(seed), ExpandableAllocator(80 * MIB), list[Block]()
    refused = 0
    for _ in range(600):
        if blocks and chance.random() < 0.45:
            allocator.free(blocks.pop(chance.randrange(len(blocks))))
            continue
        size, stream = chance.choice([700, 80_000, 900_000, 3 * MIB, 14 * MIB]), chance.choice([0, UNPACKING])
        try:
            blocks.append(allocator.allocate(size, stream))
        except BudgetError:
            refused += 1
        spans = sorted((block.begin, block.begin + block.size) for block in blocks)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        assert all(block.is_backed and not block.is_free for block in blocks)
        assert allocator.allocated == sum(block.size for block in blocks) <= allocator.reserved <= 80 * MIB
    assert refused
    for block in blocks:
        allocator.free(block)
    with pytest.raises(BudgetError):
        allocator.allocate(99 * MIB)
    assert allocator.reserved == allocator.allocated == 0


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in ALLOCATOR_SETTINGS:
        monkeypatch.setenv(name, "")  # so that what is set meanwhile is taken back
        monkeypatch.delenv(name)
    yield monkeypatch
    expandable_segments._set("expandable_segments:False")


def test_they_are_on_as_the_first_of_torchs_variables_says(unset: pytest.MonkeyPatch) -> None:
    assert not are_on()
    unset.setenv("PYTORCH_ALLOC_CONF", f"max_split_size_mb:64, {SETTING}")
    assert are_on()
    unset.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert not are_on()


def test_the_model_is_of_segments_that_expand_where_it_is_told_so() -> None:
    assert isinstance(caching_allocator(expands=True), ExpandableAllocator)
    assert not isinstance(caching_allocator(expands=False), ExpandableAllocator)


def test_they_are_turned_on_where_nobody_has_said_otherwise(unset: pytest.MonkeyPatch) -> None:
    assert would_expand()
    assert not would_expand(can=False)
    assert not are_on(), "it is only asked"
    assert turn_on()
    assert are_on()
    assert would_expand(can=False), "somebody has said so"
    unset.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    assert not turn_on()
    assert not are_on()
