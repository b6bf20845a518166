"""The training of the embedded model learns, ends with a rate of nothing, and survives a kill to the same weights."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from offstage.conf.checkpoints import training

RECIPE = training.Recipe(steps=20, rows=2, context=16)
TOKENS = torch.arange(2_000, dtype=torch.int16) % 23


class KilledError(Exception):
    """The end of a process, as far as training can tell."""


def fresh_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, tie_word_embeddings=True, use_cache=False, attn_implementation="eager",
        )
    )  # fmt: skip


def weights(model: torch.nn.Module) -> dict[str, bytes]:
    return {name: tensor.detach().numpy().tobytes() for name, tensor in model.named_parameters()}


def test_twenty_steps_learn_to_count(tmp_path: Path) -> None:
    model = fresh_model()
    before = training.held_out_loss(model, TOKENS[:200], 16)
    assert training.train(model, TOKENS, RECIPE, state=tmp_path / "state.pt").step == 20
    assert training.held_out_loss(model, TOKENS[:200], 16) < before - 0.5


def test_killed_and_resumed_it_ends_with_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fresh_model()
    training.train(whole, TOKENS, RECIPE, state=tmp_path / "whole.pt")
    monkeypatch.setattr(training, "SAVE_SECONDS", 0.0)
    killed = fresh_model()
    forwards = 0

    def kill(*_: object) -> None:
        nonlocal forwards
        forwards += 1
        if forwards > 15:
            raise KilledError

    killed.register_forward_pre_hook(kill)
    with pytest.raises(KilledError):
        training.train(killed, TOKENS, RECIPE, state=tmp_path / "state.pt")
    resumed = fresh_model()
    assert training.train(resumed, TOKENS, RECIPE, state=tmp_path / "state.pt").step == 20
    assert weights(resumed) == weights(whole)


def test_a_training_that_is_done_is_not_done_again(tmp_path: Path) -> None:
    model, again = fresh_model(), fresh_model()
    training.train(model, TOKENS, RECIPE, state=tmp_path / "state.pt")
    training.train(again, TOKENS, RECIPE, state=tmp_path / "state.pt")
    assert weights(again) == weights(model)


def test_a_limit_in_minutes_ends_it(tmp_path: Path) -> None:
    recipe = training.Recipe(steps=10**9, minutes=0.01, rows=2, context=16)
    progress = training.train(fresh_model(), TOKENS, recipe, state=tmp_path / "state.pt")
    assert progress.step < 10**6
    assert progress.seconds >= 0.6


def test_the_rate_rises_then_falls_to_nothing() -> None:
    factors = [training.rate_factor(share / 1000, 0.03) for share in range(1001)]
    top = factors.index(max(factors))
    assert factors[top] == pytest.approx(1)
    assert factors[:top] == sorted(factors[:top])
    assert factors[top:] == sorted(factors[top:], reverse=True)
    assert 0 < factors[0] < 0.1
    assert factors[-1] == pytest.approx(0, abs=1e-9)


def test_a_round_over_the_text_takes_every_row_once() -> None:
    recipe = training.Recipe(steps=1, batches=1, rows=1, context=16)
    total = len(TOKENS) // 16 - 2
    text = torch.arange(len(TOKENS))
    starts = [int(training.draw_rows(text, recipe, step)[0, 0]) for step in range(2 * total)]
    assert len(set(starts[:total])) == len(set(starts[total:])) == total
    assert [start % 16 for start in starts] == [0] * total + [37 % 16] * total
    assert starts[:total] != sorted(starts[:total])
