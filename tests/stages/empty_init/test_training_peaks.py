"""What a training step is said to hold is what a real one holds, without offload and with all of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from offstage.pipeline.errors import BudgetError
from offstage.stages.empty_init.live_storages import CountingMode, LiveStorages
from offstage.stages.empty_init.step_peaks import TrainingPeaks
from offstage.stages.empty_init.training_peaks import rehearse_step, run_backward
from tests.stages.empty_init.test_describe import CONFIGS, on_meta

FLOAT = 4


def small_net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16 * 16, 10))


def test_a_small_net_holds_what_is_computed_by_hand() -> None:
    images = torch.ones(4, 3, 16, 16)
    step = rehearse_step(small_net(), lambda model: model(images), smallest=0)
    feature_map, logits = 4 * 8 * 16 * 16 * FLOAT, 4 * 10 * FLOAT
    head, convolution = (8 * 16 * 16 * 10 + 10) * FLOAT, (3 * 8 * 9 + 8) * FLOAT
    assert step.peaks.saved_bytes == feature_map  # the ReLU's result, which the linear layer saves too, once
    assert step.peaks.gradient_bytes == head + convolution
    assert step.peaks.forward_peak == 2 * feature_map  # before and after the ReLU
    # In the ReLU's backward: its result, the gradients before and after it; those of the head; output and its gradient.
    assert step.peaks.peak() == 3 * feature_map + head + 2 * logits
    assert step.peaks.peak(1.0) == step.peaks.peak()  # the one tensor that is saved is needed at the peak


class Blocks(nn.Module):
    """Residual blocks of a size, checkpointed or not."""

    def __init__(self, count: int, *, checkpointed: bool = False, reentrant: bool = False) -> None:
        super().__init__()
        self.checkpointed, self.reentrant = checkpointed, reentrant
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)) for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=self.reentrant) if self.checkpointed else block(x))
        return x


class HeldElsewhere:
    """Saved tensors of ``smallest`` bytes and more are let go and made again, as an offload does it."""

    def __init__(self, smallest: int, weights: set[int]) -> None:
        self.smallest, self.weights = smallest, weights
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda kept: kept())

    def pack(self, tensor: torch.Tensor) -> Any:
        if tensor.untyped_storage().nbytes() < self.smallest or tensor.untyped_storage().data_ptr() in self.weights:
            return lambda: tensor
        copy = tensor.numpy(force=True).copy()  # numpy's memory isn't counted
        return lambda: torch.from_numpy(copy).clone()


def real_step_peak(model: nn.Module, *inputs: torch.Tensor, offloads: int | None = None, **named: Any) -> int:
    storages = LiveStorages()
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *inputs)}
    everything = 2**62 if offloads is None else offloads
    with CountingMode(storages):
        with HeldElsewhere(everything, weights).hooks:
            output = model(*inputs, **named)
        run_backward(output, None)
    model.zero_grad()
    return storages.peak


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_real_step_holds_what_was_rehearsed(checkpointed: bool) -> None:
    model, x = Blocks(4, checkpointed=checkpointed), torch.randn(32, 64, requires_grad=True)
    peaks = rehearse_step(model, lambda module: module(x), smallest=0).peaks
    assert peaks.peak() == real_step_peak(model, x)


def test_checkpointing_holds_less() -> None:
    x = torch.randn(1024, 64)
    plain, checkpointed, reentrant = (
        rehearse_step(model, lambda module: module(x.clone().requires_grad_())).peaks
        for model in (Blocks(8), Blocks(8, checkpointed=True), Blocks(8, checkpointed=True, reentrant=True))
    )
    assert checkpointed.saved_bytes * 5 < plain.saved_bytes
    assert checkpointed.peak() < plain.peak()
    assert reentrant.peak() < plain.peak()


@pytest.mark.parametrize(("name", "padded"), [("Llama", False), ("Llama", True), ("GPT-2", True), ("Mixtral", False)])
def test_a_real_step_of_a_language_model_holds_what_was_rehearsed_without_offload_and_with_all_of_it(
    name: str, padded: bool
) -> None:
    tokens = torch.ones((3, 40), dtype=torch.long)
    mask = torch.ones_like(tokens)
    mask[0, :7] = not padded
    named = {"input_ids": tokens, "attention_mask": mask, "labels": tokens, "use_cache": False}
    peaks = rehearse_step(on_meta(CONFIGS[name]).train(), lambda model: model(**named), smallest=4096).peaks
    real = AutoModelForCausalLM.from_config(CONFIGS[name]).train()
    assert peaks.peak() == pytest.approx(real_step_peak(real, **named), rel=0.02)
    if name != "Mixtral":  # whose halves of one tensor are saved apart
        peak, coming = real_step_peak(real, offloads=4096, **named), 3 * 40 * 64 * FLOAT
        assert peak <= peaks.peak(1.0) <= 1.02 * peak + coming  # one more tensor comes back ahead of its use


def test_what_comes_back_in_the_backward_is_let_go_again() -> None:
    """Each layer's tensors are saved several times, and asked for as often: no layer may leave any behind."""
    layers = [layer for _ in range(12) for layer in (nn.Linear(32, 32), nn.Softmax(-1), nn.LayerNorm(32))]
    model, x = nn.Sequential(*layers), torch.randn(512, 32)
    peaks = rehearse_step(model, lambda module: module(x), smallest=0).peaks
    one = 512 * 32 * FLOAT
    assert peaks.saved_bytes > 20 * one
    assert peaks.gradient_bytes + 3 * one < peaks.peak(1.0) < peaks.gradient_bytes + 8 * one


def test_a_step_that_accumulates_has_all_gradients_from_its_beginning() -> None:
    model, x = Blocks(2), torch.randn(8, 64)
    first, later = (rehearse_step(model, lambda module: module(x), accumulates=value) for value in (False, True))
    assert later.peaks.gradient_bytes == first.peaks.gradient_bytes
    assert later.peaks.forward_peak == first.peaks.forward_peak + first.peaks.gradient_bytes


def test_frozen_weights_have_no_gradients_and_their_inputs_are_not_saved() -> None:
    model, x = Blocks(2).requires_grad_(False), torch.randn(8, 64)
    step = rehearse_step(model, lambda module: module(x))
    assert (step.peaks.saved_bytes, step.peaks.gradient_bytes) == (0, 0)
    assert step.peaks.forward_peak > 0


def test_the_model_is_as_it_was_after_a_rehearsal() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    rehearse_step(model, lambda module: module(torch.ones(8, 4)))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


PEAKS = TrainingPeaks(
    saved_bytes=800, gradient_bytes=0, forward=((1000, 800, 0), (600, 100, 0)), backward=((700, 300, 100),)
)


@pytest.mark.parametrize(
    ("budget", "ratio"), [(2000, 0.0), (1000, 0.0), (702, 0.383), (601, 0.759), (508, 0.93), (501, 1.0)]
)
def test_the_least_ratio_is_that_whose_peak_just_fits(budget: int, ratio: float) -> None:
    assert PEAKS.least_ratio(budget) == ratio
    assert PEAKS.peak(ratio) <= budget
    assert ratio == 0 or PEAKS.peak(ratio - 0.001) > budget


def test_a_budget_that_no_ratio_fits_is_told_the_least_that_would() -> None:
    with pytest.raises(BudgetError, match=r"takes 501 B.*500 bytes.*give it 501 bytes or more"):
        PEAKS.least_ratio(500)


def test_what_is_held_beside_counts_at_every_ratio() -> None:
    assert [PEAKS.lifted(70).peak(ratio) for ratio in (0, 0.5, 1)] == [PEAKS.peak(ratio) + 70 for ratio in (0, 0.5, 1)]
