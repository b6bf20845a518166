"""Which prompts are decoded together."""

from __future__ import annotations

from offstage.stages.generate.batches import Asked, make_batches


def asked(*lengths: int, **options: object) -> list[Asked]:
    return [Asked(index, [1] * length, 0, options) for index, length in enumerate(lengths)]


def indices(batches: list[list[Asked]]) -> list[list[int]]:
    return [[one.index for one in batch] for batch in batches]


def test_prompts_of_like_length_share_a_batch_and_the_longest_come_first() -> None:
    assert indices(make_batches(asked(3, 9, 2, 8, 1), size=2, alone=False)) == [[1, 3], [0, 2], [4]]
    assert indices(make_batches(asked(3, 9, 2), size=None, alone=False)) == [[0, 1, 2]]


def test_what_can_not_be_padded_shares_a_batch_with_its_length_alone() -> None:
    assert indices(make_batches(asked(3, 2, 3, 2), size=None, alone=False, padded=False)) == [[0, 2], [1, 3]]


def test_prompts_with_other_options_are_apart() -> None:
    mixed = [Asked(0, [1], 0, {"top_k": 1}), Asked(1, [1], 0), Asked(2, [1], 5, {"top_k": 1})]
    assert indices(make_batches(mixed, size=None, alone=False)) == [[0, 2], [1]]


def test_each_is_alone_where_it_is_asked_for_or_transformers_wants_it() -> None:
    assert indices(make_batches(asked(1, 1), size=None, alone=True)) == [[0], [1]]
    assert indices(make_batches(asked(1, 1, prompt_lookup_num_tokens=3), size=None, alone=False)) == [[0], [1]]
