from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Container, Iterable

import pytest

from offstage.stages.dispatch.experts.eviction import HALF_LIFE_PASSES, Expert
from tests.benchmarks.eviction_rules import POLICIES, LeastFrequentlyUsed, Rule

LAYERS, EXPERTS = 5, 12


def used(rule: Rule, *passes: Iterable[Expert]) -> Rule:
    """Return ``rule`` after forwards that used those experts."""
    for experts in passes:
        rule.begin_pass()
        for expert in experts:
            rule.use(expert)
    return rule


def given_up(rule: Rule, busy: Container[Expert] = ()) -> list[Expert]:
    """Return every expert that ``rule`` gives up, in that order."""
    order = []
    while (expert := rule.victim(busy)) is not None:
        rule.forget(expert)
        order.append(expert)
    return order


@pytest.mark.parametrize("policy", POLICIES)
def test_an_expert_is_kept_from_its_first_use_until_it_is_forgotten(policy: str) -> None:
    rule = POLICIES[policy]()
    assert rule.victim(()) is None
    used(rule, [(0, 3), (1, 3), (1, 4)])
    rule.forget((1, 3))
    rule.forget((7, 7))
    assert sorted(given_up(rule)) == [(0, 3), (1, 4)]
    used(rule, [(1, 3)])
    assert given_up(rule) == [(1, 3)]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_victim_stays_until_it_is_forgotten(policy: str) -> None:
    rule = used(POLICIES[policy](), [(0, 0), (0, 1), (1, 0)])
    assert rule.victim(()) == rule.victim(())
    assert len(given_up(rule)) == 3


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_busy_is_never_given_up(policy: str) -> None:
    rule = used(POLICIES[policy](), [(0, 0), (0, 1), (1, 0)], [(0, 0), (1, 1)])
    assert sorted(given_up(rule, busy={(0, 0), (1, 1)})) == [(0, 1), (1, 0)]
    assert rule.victim({(0, 0), (1, 1)}) is None
    assert sorted(given_up(rule)) == [(0, 0), (1, 1)]


def test_lru_gives_up_what_was_used_longest_ago() -> None:
    rule = used(POLICIES["lru"](), [(0, 1), (1, 2)], [(0, 1), (1, 3)], [(0, 4)])
    assert given_up(rule) == [(1, 2), (0, 1), (1, 3), (0, 4)]


def test_lfu_gives_up_what_was_used_least_and_of_equals_what_was_used_longest_ago() -> None:
    rule = used(POLICIES["lfu"](), [(0, 0), (0, 1), (1, 5), (1, 6), (0, 0), (0, 1), (0, 1)])
    assert given_up(rule) == [(1, 5), (1, 6), (0, 0), (0, 1)]


def test_lfu_remembers_the_uses_of_an_expert_that_comes_back() -> None:
    rule = used(POLICIES["lfu"](), [(0, 0), (0, 0), (0, 0), (1, 1), (1, 1)])
    rule.forget((0, 0))
    rule.use((0, 0))
    assert given_up(rule) == [(1, 1), (0, 0)]


def test_uses_of_long_ago_count_less() -> None:
    past = [[(0, 0)]] * 20
    recent = [[(0, 1)]] * 4
    assert given_up(used(LeastFrequentlyUsed(half_life_passes=1e9), *past, *recent)) == [(0, 1), (0, 0)]
    assert given_up(used(LeastFrequentlyUsed(half_life_passes=2), *past, *recent)) == [(0, 0), (0, 1)]


def test_least_stale_gives_up_what_its_layer_passed_over_first() -> None:
    rule = used(POLICIES["least_stale"](), [(0, 0), (1, 0), (2, 0), (3, 0)], [(0, 1), (1, 1), (2, 1)])
    # 2.0, 1.0 and 0.0 weren't chosen again; 3.0 still has its chance in this pass, before the layers that just ran
    assert given_up(rule) == [(2, 0), (1, 0), (0, 0), (2, 1), (1, 1), (0, 1), (3, 0)]


def test_lfru_gives_up_what_is_used_least_of_what_was_passed_over() -> None:
    first, second, third = [(0, 0), (0, 1), (1, 0)], [(0, 0), (0, 1), (1, 1)], [(0, 2), (1, 0)]
    rule = used(POLICIES["lfru"](), first, second, third)
    # 1.1 was used once and 0.0 and 0.1 twice; of what was used last, layer 1 ran last
    assert given_up(rule) == [(1, 1), (0, 0), (0, 1), (1, 0), (0, 2)]
    rule = used(POLICIES["lfru"](), first, second, third, [(0, 0)])
    assert given_up(rule, busy={(0, 2)}) == [(1, 1), (0, 1), (0, 0), (1, 0)]


@pytest.mark.parametrize("policy", ["least_stale", "lfru"])
def test_a_rule_that_knows_of_layers_hits_where_slots_hold_less_than_a_pass(policy: str) -> None:
    every_pass = [(layer, 0) for layer in range(8)]
    assert hits(POLICIES["lru"](), [every_pass] * 10, slots=4) == 0
    # 32 of these 80 uses is also what trying every choice gives
    assert hits(POLICIES[policy](), [every_pass] * 10, slots=4) == 32


@pytest.mark.parametrize("policy", ["least_stale", "lfru"])
def test_a_layer_gives_up_its_own_first_where_it_finds_nothing_too(policy: str) -> None:
    rule = used(POLICIES[policy](), [(0, 0), (1, 0)])
    rule.begin_pass()
    rule.begin_layer(0)
    rule.use((0, 0))
    rule.begin_layer(1)
    assert rule.victim(()) == (1, 0), "layer 0 has its next chance as late, and its expert was used just now"


def hits(rule: Rule, passes: list[list[Expert]], slots: int) -> int:
    """Return how often an expert was in one of the ``slots`` already."""
    kept: set[Expert] = set()
    count = 0
    for experts in passes:
        rule.begin_pass()
        for expert in experts:
            count += expert in kept
            if expert not in kept and len(kept) == slots:
                victim = rule.victim((expert,))
                assert victim is not None
                kept.remove(victim)
                rule.forget(victim)
            kept.add(expert)
            rule.use(expert)
    return count


Order = Callable[[list[tuple[int, Expert]], int, int], list[Expert]]


def by_last_use(uses: list[tuple[int, Expert]], number: int, layer: int) -> list[Expert]:
    return list(dict.fromkeys(expert for _, expert in reversed(uses)))[::-1]


def by_count(uses: list[tuple[int, Expert]], number: int, layer: int) -> list[Expert]:
    counts: Counter[Expert] = Counter()
    for used_in, expert in uses:
        counts[expert] += 2 ** (used_in / HALF_LIFE_PASSES)  # type: ignore[assignment]
    return sorted(by_last_use(uses, number, layer), key=lambda expert: round(counts[expert], 6))


def by_chances(uses: list[tuple[int, Expert]], number: int, layer: int) -> list[Expert]:
    last = {expert: used_in * LAYERS + expert[0] for used_in, expert in uses}
    age = {expert: number * LAYERS + layer - time for expert, time in last.items()}
    return sorted(by_last_use(uses, number, layer), key=lambda expert: (-(age[expert] // LAYERS), age[expert] % LAYERS))


def by_privilege(uses: list[tuple[int, Expert]], number: int, layer: int) -> list[Expert]:
    last = {expert: used_in * LAYERS + expert[0] for used_in, expert in uses}
    passed_over = [
        expert for expert in by_count(uses, number, layer) if number * LAYERS + layer - last[expert] >= LAYERS
    ]
    return passed_over + [expert for expert in by_chances(uses, number, layer) if expert not in passed_over]


ORDERS = {"lru": by_last_use, "lfu": by_count, "least_stale": by_chances, "lfru": by_privilege}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("policy", "order"), ORDERS.items())
def test_victims_are_those_of_the_rule_told_plainly(policy: str, order: Order, seed: int) -> None:
    dice = random.Random(seed)
    rule = POLICIES[policy]()
    uses: list[tuple[int, Expert]] = []
    kept: set[Expert] = set()
    for number in range(1, 60):
        rule.begin_pass()
        for layer in range(LAYERS):
            routed = {(layer, dice.choice([dice.randrange(EXPERTS), dice.randrange(4)])) for _ in range(2)}
            for expert in sorted(routed):
                rule.use(expert)
                uses.append((number, expert))
            kept |= routed
            while len(kept) > 14:
                expected = [expert for expert in order(uses, number, layer) if expert in kept - routed]
                assert rule.victim(routed) == expected[0]
                rule.forget(expected[0])
                kept.remove(expected[0])


class Questions:
    """Experts that are busy, none of them; counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __contains__(self, expert: object) -> bool:
        self.asked += 1
        return False


@pytest.mark.parametrize("policy", POLICIES)
def test_a_victim_among_thousands_is_had_without_asking_about_them_all(policy: str) -> None:
    rule = used(POLICIES[policy](), *([[(layer, expert) for layer in range(48) for expert in range(128)]] * 3))
    busy = Questions()
    for _ in range(100):
        victim = rule.victim(busy)
        assert victim is not None
        rule.forget(victim)
    assert busy.asked == 100
