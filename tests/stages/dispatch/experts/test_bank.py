"""Which expert lies in which slot."""

import random
from collections.abc import Collection
from concurrent.futures import Future

import pytest
import torch

from offstage.stages.dispatch.experts.expert_slots import ExpertSlots
from offstage.stages.dispatch.experts.slot_memory import RowShape, slot_rows
from offstage.stages.dispatch.transfer.link import Moved
from offstage.stages.dispatch.transfer.links import HostLink
from offstage.stages.plan.expert_slots import bank_bounds, kept_share, wanted
from tests.huge_pages import is_huge
from tests.stages.dispatch.experts.small_slots import small_slots


def take(slots: ExpertSlots, number: int, busy: Collection[tuple[int, int]] = ()) -> bool:
    return slots.ask((0, number), ["weight"], busy)


def lie(slots: ExpertSlots, *numbers: int) -> list[int]:
    """Return in which slots these experts lie, counted from the first of them."""
    return slots.stack([(0, number) for number in numbers], "weight")[1]


def test_slots_on_the_host_do_not_ask_for_huge_pages_as_staging_does() -> None:
    """A virtual machine may give the first touch of one in milliseconds: each token that fills slots waits."""
    link, kind = HostLink(), (("weight", RowShape((2**20,), torch.uint8)),)
    (rows,) = slot_rows(kind, [(0, 8)], link, room=2**30)
    slots, staging = rows.stack(0, "weight", 0, 8), link.memory(8 * 2**20).lend(0, 2**20)[0]
    assert (is_huge(slots.data_ptr()), is_huge(staging.data_ptr())) == (False, True)


def test_free_slots_are_taken_before_anyone_gives_up_one() -> None:
    slots = small_slots([(10, 13)], layers=1, experts=9)
    assert all(take(slots, number) for number in range(3))
    assert sorted(lie(slots, 0, 1, 2)) == [0, 1, 2]
    assert slots.uses[0].evictions == 0


def test_the_one_that_the_rule_names_makes_room() -> None:
    slots = small_slots([(0, 2)], layers=1, experts=9)
    take(slots, 0)
    take(slots, 1)
    slots.begin_pass()
    take(slots, 0)
    take(slots, 1)
    slots.wait([(0, 0), (0, 1)], "weight")
    before = lie(slots, 0, 1)
    slots.count(0, hits=[(0, 1)], misses=1)
    assert take(slots, 2)
    assert (slots.has((0, 0)), slots.has((0, 1)), slots.uses[0].evictions) == (False, True, 1)
    assert lie(slots, 2, 1) == before


def test_where_all_are_busy_nobody_makes_room() -> None:
    slots = small_slots([(0, 1)], layers=1, experts=9)
    assert take(slots, 0)
    assert not take(slots, 1, [(0, 0)])
    assert slots.has((0, 0))


def test_as_a_pass_begins_what_is_on_its_way_stays_and_what_has_failed_can_be_asked_for_again() -> None:
    slots = small_slots([(0, 3)], layers=1, experts=9)
    assert take(slots, 0)
    assert take(slots, 1)
    broken: Future[Moved] = Future()
    broken.set_exception(OSError("torn"))
    slots._entries[0, 1].arriving[0].work.append(broken)
    slots.begin_pass()
    assert (slots.has((0, 0)), slots.has((0, 1))) == (True, False)
    assert take(slots, 1)
    slots.wait([(0, 0), (0, 1)], "weight")
    assert slots.is_there((0, 1), "weight")


@pytest.mark.parametrize(
    ("slots", "layers", "experts", "chosen", "tokens"),
    [(8, 4, 8, 2, 1), (16, 4, 8, 2, 1), (40, 6, 64, 8, 1), (12, 4, 8, 2, 4), (122, 6, 64, 8, 4), (200, 6, 64, 8, 4)],
)
def test_banks_keep_as_many_as_the_plan_expects(
    slots: int, layers: int, experts: int, chosen: int, tokens: int
) -> None:
    used = wanted(experts, chosen, tokens)
    bounds = bank_bounds(slots, layers=layers, largest=experts, together=round(used))
    kept = small_slots(bounds, layers=layers, experts=experts)
    choose, hits = random.Random(0), []
    for _ in range(400):
        kept.begin_pass()
        for layer in range(layers):
            called = {(layer, e) for _ in range(tokens) for e in choose.sample(range(experts), chosen)}
            hits.append(call(kept, layer, called))
    half = hits[len(hits) // 2 :]
    expected = kept_share(slots, layers=layers, count=experts, used=used)
    assert sum(half) / len(half) / used == pytest.approx(expected, abs=0.03)


def call(kept: ExpertSlots, layer: int, called: set[tuple[int, int]]) -> int:
    """Return how many of the experts ``called`` of ``layer`` were in ``kept``, and have all be there."""
    cached_experts = sorted(expert for expert in called if kept.has(expert))
    kept.count(layer, hits=cached_experts, misses=len(called) - len(cached_experts))
    asked = [expert for expert in sorted(called.difference(cached_experts)) if kept.ask(expert, ["weight"], called)]
    kept.wait(asked, "weight")
    return len(cached_experts)
