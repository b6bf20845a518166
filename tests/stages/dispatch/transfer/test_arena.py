import random
from itertools import pairwise

import pytest
import torch

from offstage.stages.dispatch.transfer.arena import Arena, HostMemory
from offstage.stages.dispatch.transfer.links import FreshMemory
from offstage.stages.machine.aligned_memory import ALIGNMENT
from offstage.stages.machine.devices import Ledger
from offstage.stages.units import DEVICE_ALIGNMENT


def test_regions_are_aligned_and_apart() -> None:
    arena = Arena(HostMemory(10 * ALIGNMENT))
    regions = [arena.take(ALIGNMENT + 1) for _ in range(5)]
    starts = sorted(region.data_ptr() for region in regions)
    assert all(start % ALIGNMENT == 0 for start in starts)
    assert [b - a for a, b in pairwise(starts)] == [2 * ALIGNMENT] * 4
    assert arena.used == arena.size
    assert arena.take(1) is None


def test_a_region_is_free_when_its_last_view_is_gone() -> None:
    arena = Arena(HostMemory(ALIGNMENT))
    region = arena.take(ALIGNMENT)
    view = region[64:80].view(torch.float32)[1:]
    del region
    assert arena.take(1) is None, "a tensor still sees it"
    del view
    assert arena.take(1) is not None


def test_regions_are_taken_in_a_ring() -> None:
    arena = Arena(HostMemory(4 * ALIGNMENT))
    first, second = arena.take(1), arena.take(1)
    begin = first.data_ptr()
    del first
    third = arena.take(1)
    assert third.data_ptr() == begin + 2 * ALIGNMENT, "not the gap behind"
    fourth, fifth = arena.take(1), arena.take(1)
    assert fifth.data_ptr() == begin
    assert {id(second), id(fourth)}


def test_neighbouring_gaps_are_one() -> None:
    arena = Arena(HostMemory(4 * ALIGNMENT))
    regions = [arena.take(1) for _ in range(4)]
    del regions[1:3]
    assert arena.take(2 * ALIGNMENT) is not None


def test_at_random_no_two_regions_ever_overlap() -> None:
    chance, arena, regions = random.Random(3), Arena(HostMemory(64 * ALIGNMENT)), []
    for stamp in range(1, 2000):
        if regions and chance.random() < 0.5:
            mark, region = regions.pop(chance.randrange(len(regions)))
            assert bool((region == mark).all()), "somebody else wrote into it"
            del region
        region = arena.take(chance.randrange(1, 12 * ALIGNMENT))
        if region is not None:
            region[:] = stamp % 251
            regions.append((stamp % 251, region))
        del region
    assert arena.used == sum(len(region) for _, region in regions)


def test_what_is_taken_at_the_end_leaves_the_rest_in_one_piece() -> None:
    arena = Arena(HostMemory(4 * ALIGNMENT))
    begin = (first := arena.take(1)).data_ptr()
    del first
    last, before = arena.take(1, at_end=True), arena.take(1, at_end=True)
    assert [(region.data_ptr() - begin) // ALIGNMENT for region in (last, before)] == [3, 2]
    large = arena.take(2 * ALIGNMENT)
    assert large.data_ptr() == begin
    assert arena.take(1, at_end=True) is None


def test_memory_that_is_no_multiple_of_its_alignment_is_lent_to_the_byte() -> None:
    ledger = Ledger(0, 1000)
    arena = Arena(HostMemory(1000, ledger.allocate, alignment=DEVICE_ALIGNMENT))
    assert arena.take(1001) is None
    whole = arena.take(1000)
    assert whole.nbytes == 1000
    del whole
    first, second = arena.take(400), arena.take(488)
    assert (first.nbytes, second.nbytes) == (512, 488)
    assert arena.take(1, at_end=True) is None
    del first, second, arena
    assert (ledger.allocated, ledger.peak) == (0, 1000)


@pytest.mark.parametrize("at_end", [False, True])
def test_a_region_of_an_accelerator_is_free_when_its_last_view_is_gone(at_end: bool) -> None:
    for memory in (
        HostMemory(512, Ledger(0, 512).allocate, alignment=DEVICE_ALIGNMENT),
        FreshMemory(torch.device("cpu"), 512),
    ):
        arena = Arena(memory)
        region = arena.take(512, at_end=at_end)
        view = region[4:12].view(torch.float32)
        del region
        assert arena.take(1) is None, "a tensor still sees it"
        del view
        assert arena.take(1) is not None
