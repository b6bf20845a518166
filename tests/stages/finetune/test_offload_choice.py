"""Which saved bytes go: the share is the ratio, from the first ones on, whatever the sizes."""

from hypothesis import example, given, strategies as st

from offstage.stages.finetune.offload_choice import PIECE, SMALL_SHARE, TOLERANCE, SavedSizes, ShareChoice

SIZES = st.lists(st.integers(min_value=1, max_value=10**9), min_size=1, max_size=60)
RATIOS = st.one_of(st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.floats(min_value=0, max_value=1))


def choose(ratio: float, sizes: list[int], last: list[int] | None = None) -> tuple[ShareChoice, list[int]]:
    choice = ShareChoice(ratio, None if last is None else SavedSizes.of(last))
    return choice, [choice.choose(size) for size in sizes]


@given(RATIOS, SIZES)
def test_where_a_pass_is_as_the_one_before_the_ratio_is_held_to_two_percent(ratio: float, sizes: list[int]) -> None:
    _, going = choose(ratio, sizes, sizes)
    assert abs(sum(going) - ratio * sum(sizes)) <= (TOLERANCE + SMALL_SHARE) * sum(sizes) + PIECE


@given(RATIOS, SIZES, st.integers(min_value=2, max_value=9))
def test_a_batch_that_is_larger_or_smaller_by_some_factor_is_foreseen(
    ratio: float, sizes: list[int], factor: int
) -> None:
    larger = [size * factor for size in sizes]
    for now, before in ((larger, sizes), (sizes, larger)):
        _, going = choose(ratio, now, before)
        assert abs(sum(going) - ratio * sum(now)) <= (TOLERANCE + SMALL_SHARE) * sum(now) + PIECE


@given(RATIOS, SIZES)
@example(0.1, [9, 1])  # of the first one byte should go, which is no whole piece; the second's one byte can
@example(0.5, [2 * PIECE - 1, 1])
def test_what_is_saved_first_goes_and_at_most_one_is_split(ratio: float, sizes: list[int]) -> None:
    choice, going = choose(ratio, sizes, sizes)
    spared = max(2 * TOLERANCE * sum(sizes), 2 * PIECE)  # less may be left to the tolerance, or to whole pieces
    large = [(size, gone) for size, gone in zip(sizes, going, strict=True) if size > spared]
    kept_some = [gone < size for size, gone in large]
    assert sum(0 < gone < size for size, gone in large) <= 1
    first_kept = kept_some.index(True) if any(kept_some) else len(large)
    assert all(gone == 0 for _, gone in large[first_kept + 1 :])
    assert choice.gone == sum(going)


@given(SIZES)
def test_without_a_pass_before_it_nothing_is_split_and_the_share_is_even(sizes: list[int]) -> None:
    _, going = choose(0.5, sizes)
    assert all(gone in (0, size) for size, gone in zip(sizes, going, strict=True))
    assert abs(sum(going) - 0.5 * sum(sizes)) <= max(sizes) / 2 + PIECE * len(sizes)


@given(SIZES)
def test_the_small_ones_that_stay_have_one_percent_of_the_bytes_at_most(sizes: list[int]) -> None:
    small = SavedSizes.of(sizes).small
    assert sum(size for size in sizes if size <= small) <= SMALL_SHARE * sum(sizes)


def test_of_a_ratio_of_one_and_of_zero_all_go_and_none() -> None:
    sizes = [10_000, 3, 500_000, 80_000]
    assert choose(1.0, sizes, sizes)[1] == [10_000 if SavedSizes.of(sizes).small < 10_000 else 0, 0, 500_000, 80_000]
    assert choose(0.0, sizes, sizes)[1] == [0, 0, 0, 0]


def test_a_tensor_larger_than_what_is_due_is_split() -> None:
    assert choose(0.25, [100_000, 100_000], [100_000, 100_000])[1] == [50_000 // PIECE * PIECE, 0]


def test_a_pass_that_lacks_the_first_small_tensor_of_the_last_one_sends_its_first_large_one() -> None:
    last = SavedSizes.of([64, *[10**6] * 100, *[5000] * 100])
    assert last.small == 5000
    choice = ShareChoice(1.0, last)
    assert [choice.choose(10**6) for _ in range(100)] == [10**6] * 100
