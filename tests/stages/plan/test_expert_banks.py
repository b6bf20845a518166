"""How slots are divided among layers, and what that is expected to keep."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from stages.plan.expert_banks import bank_bounds, kept_share, wanted


@given(slots=st.integers(1, 5000), layers=st.integers(1, 90), largest=st.integers(1, 256), together=st.integers(1, 200))
def test_banks_cover_the_slots_and_hold_what_a_call_uses_twice_over_where_they_can(
    slots: int, layers: int, largest: int, together: int
) -> None:
    bounds = bank_bounds(slots, layers=layers, largest=largest, together=together)
    assert [begin for begin, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
    assert bounds[-1][1] == min(slots, layers * largest)
    assert len(bounds) <= layers
    assert all(end - begin >= min(2 * together, bounds[-1][1]) for begin, end in bounds)


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
