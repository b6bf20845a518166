"""How slots are divided among layers, and what that is expected to keep."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, strategies as st

from offstage.stages.dispatch.experts.eviction import Expert
from offstage.stages.dispatch.experts.expert_slots import ExpertSlots
from offstage.stages.plan.expert_slots import bank_bounds, kept_share, wanted
from tests.stages.dispatch.experts.small_slots import small_slots

TENSORS = ("gate_up_proj", "down_proj")
"""What there is of each expert."""


@given(slots=st.integers(1, 5000), layers=st.integers(1, 90), largest=st.integers(1, 256), together=st.integers(1, 200))
def test_banks_cover_the_slots_and_hold_what_a_call_uses_twice_over_where_they_can(
    slots: int, layers: int, largest: int, together: int
) -> None:
    bounds = bank_bounds(slots, layers=layers, largest=largest, together=together)
    assert [begin for begin, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
    assert bounds[-1][1] == min(slots, layers * largest)
    assert len(bounds) <= layers
    least = min(largest if bounds[-1][1] == layers * largest else 2 * together, bounds[-1][1])
    assert all(end - begin >= least for begin, end in bounds)


def test_tokens_of_one_pass_share_experts() -> None:
    assert [wanted(6, 3, tokens) for tokens in (1, 2, 1000)] == pytest.approx([3, 4.5, 6])


@pytest.mark.parametrize(
    ("slots", "share"),
    [(0, 0), (8, 0), (16, 0.04), (80, 80 / 320), (160, 0.5), (320, 1), (900, 1)],
)
def test_a_share_is_expected_of_what_slots_hold_beyond_one_call(slots: int, share: float) -> None:
    """Five layers of 64 experts, of which a token uses 8: from 80 slots on each layer has a bank of its own."""
    assert kept_share(slots, layers=5, count=64, used=8) == pytest.approx(share, abs=0.01)


def test_one_layer_whose_call_uses_more_than_its_bank_holds_keeps_nothing() -> None:
    assert kept_share(20, layers=1, count=64, used=26.5) == 0
    assert kept_share(30, layers=1, count=64, used=26.5) == 30 / 64


def test_where_all_experts_have_slots_each_layer_has_those_of_its_own() -> None:
    assert bank_bounds(999, layers=3, largest=10, together=9) == [(0, 10), (10, 20), (20, 30)]
    assert kept_share(30, layers=3, count=10, used=9) == 1


@pytest.mark.parametrize(
    ("slots", "prompt", "passes"),
    [(384, 4, 16), (320, 4, 16), (320, 4, 64), (320, 64, 64), (120, 4, 16), (100, 64, 32), (70, 4, 32), (40, 64, 32),
     (384, 1, 3), (160, 1, 7), (160, 4, 7), (240, 64, 7), (320, 64, 7)],
)  # fmt: skip
def test_what_is_expected_is_what_uniform_routing_finds(slots: int, prompt: int, passes: int) -> None:
    """Six layers of 64 experts, of which a token uses 8; slots are empty as the prompt begins."""
    before = wanted(64, 8, prompt)
    expected = kept_share(slots, layers=6, count=64, used=8, before=before, passes=passes)
    runs = [hit_count for seed in range(6) for hit_count in hits(slots, prompt, passes, random.Random(seed))]
    assert sum(runs) / len(runs) / 8 == pytest.approx(expected, abs=0.04)


def hits(slots: int, prompt: int, passes: int, draw: random.Random) -> Iterator[int]:
    """Yield how many of the experts of a layer's call are in slots, for each call of decoding."""
    bounds = bank_bounds(slots, layers=6, largest=64, together=8)
    kept = small_slots(bounds, layers=6, experts=64, pieces=TENSORS)
    for number in range(1 + passes):
        kept.begin_pass()
        for layer in range(6):
            tokens = prompt if number == 0 else 1
            routed = sorted({(layer, expert) for _ in range(tokens) for expert in draw.sample(range(64), 8)})
            hit_count = call(kept, layer, routed)
            if number:
                yield hit_count


def call(kept: ExpertSlots, layer: int, routed: list[Expert]) -> int:
    """Have ``kept`` bring what a layer's call uses, one tensor of all after the other; return how many were whole."""
    cached_experts = [expert for expert in routed if kept.has(expert)]
    kept.count(layer, hits=cached_experts, misses=len(routed) - len(cached_experts))
    busy = routed if len(routed) <= kept.room(layer) else []
    for tensor in TENSORS:
        waiting = [expert for expert in routed if not kept.is_there(expert, tensor)]
        for begin in range(0, len(waiting), 4):
            batch = waiting[begin : begin + 4]
            for expert in batch:
                assert kept.ask(expert, [tensor], [*busy, *batch])
            kept.wait(batch, tensor)
    return len(cached_experts)
