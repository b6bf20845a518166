"""Banks: which expert lies in which slot, and how slots are divided."""

from hypothesis import given, strategies as st

from stages.dispatch.experts.bank import Bank, bank_bounds
from stages.dispatch.experts.eviction import POLICIES


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


@given(slots=st.integers(1, 5000), layers=st.integers(1, 90), largest=st.integers(1, 256), together=st.integers(1, 12))
def test_banks_cover_the_slots_and_hold_what_a_token_uses_twice_over_where_they_can(
    slots: int, layers: int, largest: int, together: int
) -> None:
    bounds = bank_bounds(slots, layers=layers, largest=largest, together=together)
    assert [begin for begin, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
    assert bounds[-1][1] == min(slots, layers * largest)
    assert len(bounds) <= layers
    assert all(end - begin >= min(2 * together, bounds[-1][1]) for begin, end in bounds)
