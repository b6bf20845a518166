from collections.abc import Iterator
from itertools import islice

from offstage.stages.dispatch.streaming.schedule import Schedule


def upcoming(schedule: Schedule) -> Iterator[int]:
    """Yield what is to be asked for next, each noted as asked for once the one after it is drawn."""
    while (part := schedule.next_to_ask()) is not None:
        yield part
        schedule.note_asked(part)


def ask(schedule: Schedule, count: int) -> list[int]:
    """Ask for ``count`` parts, or for all that may be asked for."""
    return list(islice(upcoming(schedule), count + 1))[:count]


def test_parts_are_asked_for_in_order_and_round_to_the_next_pass() -> None:
    schedule = Schedule([1, 2, 3])
    assert list(upcoming(schedule)) == [1, 2, 3]
    schedule.use(1)
    assert list(upcoming(schedule)) == [1], "the next token's first part"


def test_a_part_that_was_offered_and_not_taken_is_offered_again() -> None:
    schedule = Schedule([1, 2, 3])
    for part in upcoming(schedule):
        if part == 2:
            break
    assert next(upcoming(schedule)) == 2
    assert schedule.wanted(1)
    assert not schedule.wanted(2)


def test_a_part_is_wanted_from_asking_to_playing() -> None:
    schedule = Schedule([1, 2, 1])
    list(upcoming(schedule))
    schedule.use(1)
    assert schedule.wanted(1), "its second use was asked for too"
    schedule.use(2)
    schedule.use(1)
    assert not schedule.wanted(1)


def test_a_part_played_early_skips_what_stood_before_it() -> None:
    schedule = Schedule([1, 2, 3, 4])
    list(upcoming(schedule))
    schedule.use(3)
    assert not schedule.wanted(1)
    assert not schedule.wanted(2)
    assert schedule.wanted(4)
    assert ask(schedule, 2) == [1, 2]


def test_an_unknown_part_moves_nothing() -> None:
    schedule = Schedule([1, 2])
    schedule.use(9)
    assert ask(schedule, 2) == [1, 2]


def test_the_order_of_a_whole_pass_is_learned() -> None:
    schedule = Schedule([1, 2, 3])
    schedule.begin_pass()
    for part in (3, 1, 3):
        schedule.use(part)
    assert schedule.end_pass()
    assert schedule.order == [3, 1, 3]
    assert list(upcoming(schedule)) == [3, 1, 3]


def test_a_pass_that_was_broken_off_teaches_nothing() -> None:
    schedule = Schedule([1, 2, 3])
    schedule.begin_pass()
    schedule.use(1)
    schedule.begin_pass()
    assert schedule.order == [1, 2, 3]
    for part in (1, 2, 3):
        schedule.use(part)
    assert not schedule.end_pass()


def test_a_new_pass_begins_at_the_first_part() -> None:
    schedule = Schedule([1, 2, 3])
    schedule.begin_pass()
    schedule.use(1)
    schedule.begin_pass()
    assert ask(schedule, 3) == [1, 2, 3]


def test_an_empty_order_asks_for_nothing() -> None:
    schedule = Schedule([])
    schedule.begin_pass()
    schedule.use(1)
    assert list(upcoming(schedule)) == []
    assert schedule.end_pass()
    assert schedule.order == [1]


def test_optional_parts_are_in_no_order_and_move_nothing() -> None:
    schedule = Schedule([1, 7, 2, 8, 3], optional={7, 8})
    schedule.begin_pass()
    assert schedule.order == [1, 2, 3]
    for part in (1, 8, 2, 3):
        schedule.use(part)
    assert not schedule.end_pass(), "what was called of them teaches nothing"
    assert schedule.order == [1, 2, 3]


def play(schedule: Schedule, parts: list[int]) -> None:
    schedule.begin_pass()
    for part in parts:
        schedule.use(part)
    schedule.end_pass()


def test_a_part_that_was_left_out_once_is_never_certain_again() -> None:
    schedule = Schedule([1, 2, 3, 4])
    play(schedule, [1, 3, 4])
    assert schedule.order == [1, 3, 4]
    play(schedule, [1, 2, 3, 4])
    assert schedule.order == [1, 3, 4]


def test_a_part_that_no_rehearsal_knew_is_certain_once_a_pass_has_used_it() -> None:
    schedule = Schedule([1, 2])
    play(schedule, [1, 5, 2])
    assert schedule.order == [1, 5, 2]


def go(schedule: Schedule, parts: list[int]) -> None:
    for part in parts:
        schedule.use(part)


def test_a_backward_is_expected_to_ask_in_the_reverse_order_for_what_was_saved() -> None:
    schedule = Schedule([1, 2, 3, 4])
    play(schedule, [1, 2, 3, 4])
    assert schedule.turn([1, 3, 4])
    assert ask(schedule, 5) == [4, 3, 1, 1, 2], "and then comes the next pass"


def test_a_backward_is_expected_after_each_pass_once_there_was_one() -> None:
    schedule = Schedule([1, 2, 3])
    play(schedule, [1, 2, 3])
    schedule.turn([2, 3])
    go(schedule, [3, 2])
    schedule.begin_pass()
    assert ask(schedule, 5) == [1, 2, 3, 3, 2]
    go(schedule, [1, 2, 3])
    assert not schedule.end_pass()
    assert not schedule.turn([2, 3])


def test_the_next_backward_is_expected_as_the_last_one_was_where_as_much_was_saved() -> None:
    schedule = Schedule([1, 2, 3])
    play(schedule, [1, 2, 3])
    schedule.turn([1, 2, 3])
    go(schedule, [3, 1, 2, 2, 1])
    play(schedule, [1, 2, 3])
    assert not schedule.turn([1, 2, 3])
    assert ask(schedule, 5) == [3, 1, 2, 2, 1], "parts of the forward were computed again"
    play(schedule, [1, 2, 3])
    assert schedule.turn([2, 3])
    assert ask(schedule, 2) == [3, 2]


def test_a_pass_without_a_backward_expects_none_after_the_next() -> None:
    schedule = Schedule([1, 2])
    play(schedule, [1, 2])
    schedule.turn([1, 2])
    go(schedule, [2, 1])
    play(schedule, [1, 2])
    go(schedule, [1])
    assert schedule.begin_pass(), "a call of one module alone is no backward"
    assert schedule.order == [1, 2]


def test_the_backward_of_an_older_pass_begins_where_backwards_do() -> None:
    schedule = Schedule([1, 2, 3])
    play(schedule, [1, 2, 3])
    play(schedule, [1, 2, 3])
    schedule.turn([1, 2, 3])
    go(schedule, [3, 2, 1])
    assert schedule.turn([1, 2, 3])
    assert ask(schedule, 3) == [3, 2, 1]


ENCODER, DECODER = [1, 2, 3], [4, 5, 6]


def test_an_encoder_that_is_called_outside_of_the_passes_is_expected_before_the_first_one() -> None:
    schedule = Schedule(ENCODER + DECODER)
    go(schedule, ENCODER)
    assert ask(schedule, 3) == DECODER
    schedule.begin_pass()
    assert schedule.order == DECODER, "and not the encoder again"
    assert ask(schedule, 2) == [4, 5]


def generated(schedule: Schedule, encoder: list[int] = ENCODER) -> None:
    go(schedule, encoder)
    play(schedule, DECODER)
    play(schedule, DECODER)


def test_once_an_encoder_is_called_again_the_rest_of_it_is_expected_and_then_the_decoder() -> None:
    schedule = Schedule(ENCODER + DECODER)
    generated(schedule)
    assert ask(schedule, 3) == DECODER
    assert schedule.use(1), "others than before"
    assert ask(schedule, 5) == [2, 3, 4, 5, 6]
    assert not schedule.use(2)
    assert ask(schedule, 5) == [], "all of it was asked for"
    assert not schedule.wanted(2)
    assert schedule.wanted(3)
    schedule.use(3)
    schedule.begin_pass()
    assert all(schedule.wanted(part) for part in DECODER)
    assert not any(schedule.wanted(part) for part in ENCODER)


def test_a_tower_that_runs_in_the_first_pass_of_a_prompt_is_expected_in_none_but_followed_once_it_runs() -> None:
    schedule = Schedule(ENCODER + DECODER)
    for _ in range(2):
        play(schedule, ENCODER + DECODER)
        play(schedule, DECODER)
    assert schedule.order == DECODER
    schedule.begin_pass()
    assert ask(schedule, 3) == DECODER
    schedule.use(1)
    assert ask(schedule, 5) == [2, 3, 4, 5, 6]
    schedule.use(4)
    assert not schedule.wanted(2), "it has broken off"
    assert schedule.wanted(5)


def test_what_only_the_first_pass_of_a_prompt_uses_is_expected_amid_what_all_use_once_it_has_begun() -> None:
    schedule, first, other = Schedule([1, 2, 3, 4, 5, 6]), [1, 2, 3, 4, 5, 6], [1, 4, 6]
    for _ in range(2):
        play(schedule, first)
        play(schedule, other)
    assert schedule.order == other
    schedule.begin_pass()
    go(schedule, [1])
    assert schedule.use(2)
    assert ask(schedule, 7) == [3, 4, 5, 6, 1, 4, 6], "the rest of it, and then the next pass"
    go(schedule, [3, 4, 5, 6])
    assert not schedule.end_pass()
    assert all(schedule.wanted(part) for part in other)


def test_what_follows_in_a_tower_is_what_followed_last() -> None:
    schedule = Schedule(ENCODER + DECODER)
    generated(schedule)
    generated(schedule, [3, 1])
    schedule.use(3)
    assert ask(schedule, 2) == [1, 4]
    schedule.use(1)
    schedule.use(3)
    assert ask(schedule, 2) == [1, 4], "it was called again"


def test_what_two_passes_in_turn_have_used_is_certain_again() -> None:
    schedule = Schedule(ENCODER + DECODER)
    play(schedule, DECODER)
    for _ in range(2):
        play(schedule, ENCODER + DECODER)
    assert schedule.order == ENCODER + DECODER


def test_what_is_called_outside_of_passes_now_and_then_stays_in_their_order() -> None:
    schedule = Schedule([1, 2, 3])
    play(schedule, [1, 2, 3])
    for _ in range(3):
        go(schedule, [1])
        play(schedule, [1, 2, 3])
        assert schedule.order == [1, 2, 3]
