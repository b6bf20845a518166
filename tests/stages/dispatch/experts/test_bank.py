"""Banks: which expert lies in which slot."""

import random

import pytest

from offstage.stages.dispatch.experts.bank import Bank
from offstage.stages.dispatch.experts.eviction import DEFAULT, POLICIES
from offstage.stages.plan.expert_slots import bank_bounds, kept_share, wanted


def bank(size: int) -> Bank:
    return Bank(10, 10 + size, POLICIES["lru"]())


def take(banked: Bank, number: int, busy: tuple[tuple[int, int], ...] = ()) -> int | None:
    slot = banked.take((0, number), busy)
    if slot is not None:
        banked.policy.use((0, number))
    return slot


def test_free_slots_are_taken_before_anyone_gives_up_one() -> None:
    banked = bank(3)
    assert {take(banked, number) for number in range(3)} == {10, 11, 12}
    assert banked.evictions == 0


def test_the_one_that_the_rule_names_makes_room() -> None:
    banked = bank(2)
    slot = take(banked, 0)
    take(banked, 1)
    dropped = []
    assert banked.take((0, 2), (), dropped=dropped.append) == slot
    assert (dropped, banked.slot((0, 0)), banked.evictions) == ([(0, 0)], None, 1)


def test_where_all_are_busy_nobody_makes_room() -> None:
    banked = bank(1)
    take(banked, 0)
    assert take(banked, 1, ((0, 0),)) is None
    assert banked.slot((0, 0)) == 10


@pytest.mark.parametrize(
    ("slots", "layers", "experts", "chosen", "tokens"),
    [(8, 4, 8, 2, 1), (16, 4, 8, 2, 1), (40, 6, 64, 8, 1), (12, 4, 8, 2, 4), (122, 6, 64, 8, 4), (200, 6, 64, 8, 4)],
)
def test_banks_keep_as_many_as_the_plan_expects(
    slots: int, layers: int, experts: int, chosen: int, tokens: int
) -> None:
    used = wanted(experts, chosen, tokens)
    bounds = bank_bounds(slots, layers=layers, largest=experts, together=round(used))
    banks = [Bank(begin, end, POLICIES[DEFAULT]()) for begin, end in bounds]
    choose, found = random.Random(0), []
    for _ in range(400):
        for banked in banks:
            banked.policy.begin_pass()
        for layer in range(layers):
            called = {(layer, e) for _ in range(tokens) for e in choose.sample(range(experts), chosen)}
            found.append(call(banks[layer % len(banks)], layer, called))
    half = found[len(found) // 2 :]
    expected = kept_share(slots, layers=layers, count=experts, used=used)
    assert sum(half) / len(half) / used == pytest.approx(expected, abs=0.03)


def call(banked: Bank, layer: int, called: set[tuple[int, int]]) -> int:
    """Return how many of the experts ``called`` of ``layer`` were in ``banked``, and have all be there."""
    there = {expert for expert in called if banked.slot(expert) is not None}
    banked.policy.begin_layer(layer)
    for expert in sorted(there):
        banked.policy.use(expert)
    for expert in sorted(called - there):
        if banked.take(expert, called) is not None:
            banked.policy.use(expert)
    return len(there)
