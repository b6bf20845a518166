"""Blocks that are alike are rehearsed by three of them, and what is noted is what all of them would have shown."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PretrainedConfig, Qwen3MoeConfig

from offstage.stages.empty_init import init_empty_weights, rehearsal
from offstage.stages.empty_init.rehearsal import Rehearsal, rehearse
from offstage.stages.empty_init.repeated_blocks import find_alike

COUNT = 8


class Block(nn.Module):
    """Reads the weight of ``inner`` beside calling it, and notes that it ran."""

    def __init__(self, place: int, ran: list[int]) -> None:
        super().__init__()
        self.place = place
        self.inner = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self._ran = ran

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._ran.append(self.place)
        return self.norm(x @ self.inner.weight) + self.inner(x)


class Stacked(nn.Module):
    """``COUNT`` blocks, one after the other."""

    def __init__(self, block: Callable[[int, list[int]], Block] = Block) -> None:
        super().__init__()
        self.ran: list[int] = []
        self.blocks = nn.ModuleList(block(place, self.ran) for place in range(COUNT))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def call(model: nn.Module) -> object:
    return model(torch.ones(2, 4))


def rehearsed_whole(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, run: Callable[[nn.Module], object] | None = call
) -> Rehearsal:
    """Return what a rehearsal shows that runs every block."""
    with monkeypatch.context() as patched:
        patched.setattr(rehearsal, "find_alike", lambda _model: [])
        return rehearse(model, run)


def test_the_first_two_and_the_last_are_run_and_the_others_are_noted_all_the_same(monkeypatch) -> None:
    model = Stacked()
    seen = rehearse(model, call)
    assert model.ran == [0, 1, COUNT - 1]
    assert seen == rehearsed_whole(model, monkeypatch)
    assert seen.users["blocks.4.inner.weight"] == {"blocks.4", "blocks.4.inner"}


@pytest.mark.parametrize(
    "config",
    [
        Gemma3TextConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=24, num_attention_heads=4, num_key_value_heads=2,
            head_dim=8, vocab_size=64, sliding_window=16,
        ),
        Qwen3MoeConfig(
            hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=6, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, vocab_size=64, num_experts=4, num_experts_per_tok=2, mlp_only_layers=[1],
        ),
    ],
    ids=["layers of two kinds in turn", "a dense layer among mixtures"],
)  # fmt: skip
def test_a_model_of_several_kinds_of_layers_is_noted_as_if_all_had_run(config: PretrainedConfig, monkeypatch) -> None:
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    assert find_alike(model)
    assert rehearse(model) == rehearsed_whole(model, monkeypatch, None)


class Other(Block):
    """Does something else in the last block, which none of its attributes shows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.place < COUNT - 1 else self.norm(x)


def test_where_the_last_one_does_something_else_all_are_run(monkeypatch) -> None:
    model = Stacked(Other)
    seen = rehearse(model, call)
    assert model.ran == [0, 1, *range(COUNT - 1)]
    assert seen == rehearsed_whole(model, monkeypatch)
    assert f"blocks.{COUNT - 1}.inner" not in seen.order


class Growing(Stacked):
    """Calls each of its blocks with more rows than the one before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, block in enumerate(self.blocks):
            x = block(torch.ones(2 + place, 4))
        return x


def test_a_block_that_is_called_with_something_else_is_run(monkeypatch) -> None:
    model = Growing()
    seen = rehearse(model, call)
    assert set(model.ran) == set(range(COUNT))
    assert seen == rehearsed_whole(model, monkeypatch)


def of_two_kinds(place: int, ran: list[int]) -> Block:
    block = Block(place, ran)
    block.norm = nn.LayerNorm(4, eps=1e-5 if place % 2 else 1e-6)
    return block


def test_blocks_are_told_apart_by_an_attribute_of_a_part() -> None:
    kinds = [blocks.names for blocks in find_alike(Stacked(of_two_kinds))]
    assert kinds == [tuple(f"blocks.{place}" for place in range(first, COUNT, 2)) for first in (0, 1)]


def test_a_block_with_a_tensor_or_a_part_of_another_is_like_none() -> None:
    model = Stacked()
    model.blocks[3].inner.weight = model.blocks[4].inner.weight
    model.blocks[5].norm = model.blocks[6].norm
    assert [blocks.names for blocks in find_alike(model)] == [tuple(f"blocks.{place}" for place in (0, 1, 2, 7))]


class Twice(Stacked):
    """Goes through its blocks twice, the second time through some of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        for block in self.blocks[::3]:
            x = block(x)
        return x


def test_each_pass_through_the_blocks_is_noted_by_itself(monkeypatch) -> None:
    model = Twice()
    assert rehearse(model, call) == rehearsed_whole(model, monkeypatch)
