import random
from itertools import pairwise

import numpy as np
import torch

from stages.dispatch.arena import Arena, HostMemory
from stages.shard_load.memory import ALIGNMENT


def test_regions_are_aligned_and_apart() -> None:
    arena = Arena(HostMemory(10 * ALIGNMENT))
    regions = [arena.take(ALIGNMENT + 1) for _ in range(5)]
    starts = sorted(region.__array_interface__["data"][0] for region in regions)
    assert all(start % ALIGNMENT == 0 for start in starts)
    assert [b - a for a, b in pairwise(starts)] == [2 * ALIGNMENT] * 4
    assert arena.used == arena.size
    assert arena.take(1) is None


def test_a_region_is_free_when_its_last_view_is_gone() -> None:
    arena = Arena(HostMemory(ALIGNMENT))
    region = arena.take(ALIGNMENT)
    view = torch.frombuffer(region, dtype=torch.float32, count=4, offset=64)[1:]
    del region
    assert arena.take(1) is None, "a tensor still sees it"
    del view
    assert arena.take(1) is not None


def test_regions_are_taken_in_a_ring() -> None:
    arena = Arena(HostMemory(4 * ALIGNMENT))
    first, second = arena.take(1), arena.take(1)
    begin = first.__array_interface__["data"][0]
    del first
    third = arena.take(1)
    assert third.__array_interface__["data"][0] == begin + 2 * ALIGNMENT, "not the gap behind"
    fourth, fifth = arena.take(1), arena.take(1)
    assert fifth.__array_interface__["data"][0] == begin
    assert {id(second), id(fourth)}


def test_neighbouring_gaps_are_one() -> None:
    arena = Arena(HostMemory(4 * ALIGNMENT))
    held = [arena.take(1) for _ in range(4)]
    del held[1:3]
    assert arena.take(2 * ALIGNMENT) is not None


def test_at_random_no_two_regions_ever_overlap() -> None:
    chance, arena, held = random.Random(3), Arena(HostMemory(64 * ALIGNMENT)), []
    for stamp in range(1, 2000):
        if held and chance.random() < 0.5:
            mark, region = held.pop(chance.randrange(len(held)))
            assert np.all(region == mark), "somebody else wrote into it"
            del region
        region = arena.take(chance.randrange(1, 12 * ALIGNMENT))
        if region is not None:
            region[:] = stamp % 251
            held.append((stamp % 251, region))
        del region
    assert arena.used == sum(len(region) for _, region in held)
