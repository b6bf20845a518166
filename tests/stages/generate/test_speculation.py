"""Exact speculation: whatever is guessed, tokens and their scores are those of plain decoding, to the bit."""

from __future__ import annotations

import copy
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from offstage import lockstep
from offstage.stages.generate import speculation
from offstage.stages.generate.drafts import DraftLength
from tests.long_form import in_ci
from tests.stages.generate.guessed_models import (
    CONFIGS,
    SAMPLED,
    answer,
    edited_prompt,
    open_streamed,
    random_prompt,
    save_model,
)

CASES = [(name, torch.float32) for name in CONFIGS if name not in ("bloom", "gpt_oss")] + [("llama", torch.bfloat16)]
"""The others, and both dtypes of all: ``tests/benchmarks/speculation_grid.py``."""


IN_CI = [("t5", torch.float32), ("llama", torch.bfloat16)]


@pytest.mark.parametrize(("name", "dtype"), in_ci(*IN_CI, of=CASES), ids=[f"{name}-{dtype}" for name, dtype in CASES])
def test_tokens_and_their_scores_are_those_of_plain_decoding(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    plain, wrong, right = save_model(tmp_path, name, dtype), 0, 0
    with open_streamed(tmp_path) as loaded:
        for prompt in (edited_prompt(plain, 1), random_prompt(2)):
            for options in ({}, SAMPLED):
                wanted = answer(loaded.model, prompt, **options)
                speculated = answer(loaded.model, prompt, guesses=5, **options)
                assert speculated.tokens == wanted.tokens == answer(plain, prompt, **options).tokens
                assert speculated.scores == wanted.scores
                assert (
                    speculated.judged.tokens
                    == len(speculated.tokens)
                    == speculated.judged.passes + speculated.judged.accepted
                )
                right += speculated.judged.accepted
                wrong += speculated.judged.guessed - speculated.judged.accepted
        assert loaded.traffic.overflow_bytes == 0
    assert right > 0, "every guess was wrong"
    assert wrong > 0, "no guess was wrong"


def test_a_pass_brings_the_weights_once_for_all_guesses(tmp_path: Path) -> None:
    plain = save_model(tmp_path, "llama", torch.float32)
    prompt, one = edited_prompt(plain, 1), sum(parameter.nbytes for parameter in plain.parameters())
    with open_streamed(tmp_path) as loaded:
        before = loaded.traffic.streamed_bytes
        judged = answer(loaded.model, prompt, guesses=5).judged
        assert judged.passes < judged.tokens
        assert loaded.traffic.streamed_bytes - before <= judged.passes * one


@pytest.mark.parametrize(
    ("name", "assists"),
    in_ci(("t5", True), of=product(["llama", "gemma3", "mixtral", "t5"], [False, True])),
)
def test_prompts_in_lockstep_guess_too_and_share_passes(name: str, assists: bool, tmp_path: Path) -> None:
    plain = save_model(tmp_path, name, torch.float32)
    asked = [edited_prompt(plain, number) if number % 2 else random_prompt(number) for number in range(6)]
    with open_streamed(tmp_path) as loaded:
        guess = {"guesses": 5, "assistant": plain if assists else None}
        before = loaded.traffic.streamed_bytes
        wanted = [answer(loaded.model, prompt, **guess) for prompt in asked]
        between = loaded.traffic.streamed_bytes
        speculated = lockstep(
            loaded.model, [partial(answer, loaded.model, prompt, **guess) for prompt in asked], size=4
        )
        after = loaded.traffic.streamed_bytes
    for mine, theirs, prompt in zip(speculated, wanted, asked, strict=True):
        assert mine.tokens == theirs.tokens == answer(plain, prompt).tokens
        assert mine.scores == theirs.scores
        assert mine.judged == theirs.judged
    assert sum(one.judged.accepted for one in speculated) > 0
    assert after - between < 0.6 * (between - before)


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_an_assistant_guesses_and_draws_as_the_model_will(options: dict[str, Any], tmp_path: Path) -> None:
    plain = save_model(tmp_path, "llama", torch.float32)
    plain.generation_config.assistant_confidence_threshold = 0.0
    other = copy.deepcopy(plain)
    for parameter in other.model.layers[1].parameters():
        parameter.data.neg_()
    prompt = random_prompt(2)
    with open_streamed(tmp_path) as loaded:
        wanted = answer(loaded.model, prompt, **options)
        same, unlike = (answer(loaded.model, prompt, guesses=1, assistant=one, **options) for one in (plain, other))
    assert same.tokens == unlike.tokens == wanted.tokens
    assert same.scores == unlike.scores == wanted.scores
    assert same.judged.accepted == same.judged.guessed > 0, "it draws other random numbers than the model"
    assert unlike.judged.accepted < unlike.judged.guessed


@pytest.mark.parametrize("off", [-1, 1], ids=["one too few", "one too many"])
def test_a_cache_that_is_taken_back_wrongly_does_not_go_unseen(
    off: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = save_model(tmp_path, "llama", torch.float32)
    prompt, take_back = edited_prompt(plain, 1), speculation.take_back

    def take_back_wrongly(cache: Any, positions: int) -> None:
        take_back(cache, max(0, positions + off * (positions > 0)))

    monkeypatch.setattr(speculation, "take_back", take_back_wrongly)
    with open_streamed(tmp_path) as loaded:
        speculated, wanted = answer(loaded.model, prompt, guesses=5), answer(loaded.model, prompt)
    assert speculated.judged.guessed > speculated.judged.accepted
    assert speculated.scores != wanted.scores


def test_ends_strings_and_the_most_tokens_stop_it_where_they_stop_plain_decoding(tmp_path: Path) -> None:
    plain = save_model(tmp_path, "llama", torch.float32)
    prompt = edited_prompt(plain, 1)
    whole = answer(plain, prompt).tokens
    with open_streamed(tmp_path) as loaded:
        for end in whole[2], whole[7], whole[11]:
            speculated = answer(loaded.model, prompt, guesses=5, eos_token_id=end)
            assert speculated.tokens == whole[: whole.index(end) + 1]
        assert answer(loaded.model, prompt, guesses=5, new=1).tokens == whole[:1]
        assert answer(loaded.model, prompt, guesses=50, free=99.0, new=7).tokens == whole[:7]


def learnt(free: float, *, stood: int, guessed: int, cost: float = 0.0) -> int:
    """Return how many are guessed after some passes in which so many of the guesses stood."""
    length = DraftLength(20, free=free, cost=cost)
    for _ in range(12):
        length.learn(stood, guessed)
    return length.next(room=100)


def test_as_many_are_guessed_as_a_pass_carries_and_as_have_stood() -> None:
    assert [learnt(free, stood=5, guessed=5) for free in (0.0, 1.0, 3.0, 8.0)] == [0, 0, 2, 7]
    assert 1 < learnt(8.0, stood=1, guessed=5) < 7
    assert learnt(8.0, stood=0, guessed=5) == 1, "else it would never learn that guesses stand again"
    assert learnt(8.0, stood=5, guessed=5, cost=2.0) < 7, "what guesses takes time too"
    assert DraftLength(20, free=8.0).next(room=2) == 2
    assert DraftLength(20, free=8.0).next(room=0) == 0
