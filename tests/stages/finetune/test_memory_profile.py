"""A memory profile says what was computed by hand, what a process really took, and the same without data."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from offstage import MemoryProfile, least_ratio, profile_memory
from offstage.pipeline.errors import BudgetError, ConfigError
from tests.__main__ import with_tests
from tests.stages.dispatch.placed_models import Setup, net
from tests.stages.empty_init.test_training_peaks import Blocks
from tests.stages.finetune.high_water import NETS

FLOAT = 4


class TwoWays(nn.Module):
    """A convolution, and an MLP that is called twice on what it made."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1)
        self.mlp = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return (batch, 8, 64) of images (batch, 3, 8, 8)."""
        made = self.convolution(images).flatten(2)
        return self.mlp(self.mlp(made))


def shown(profile: MemoryProfile) -> dict[str, Any]:
    return {row.name: row for row in profile.modules}


@pytest.mark.parametrize("data", [True, False])
def test_the_bytes_of_a_small_net_are_those_computed_by_hand(data: bool) -> None:
    profile = profile_memory(TwoWays(), torch.randn(4, 3, 8, 8), data=data)
    made, wide = 4 * 8 * 64 * FLOAT, 4 * 8 * 128 * FLOAT
    weights = {"convolution": (8 * 3 * 9 + 8) * FLOAT, "mlp.0": (64 * 128 + 128) * FLOAT}
    weights["mlp.2"] = (128 * 64 + 64) * FLOAT
    weights["mlp"] = weights["mlp.0"] + weights["mlp.2"]
    rows = shown(profile)
    assert {name: row.parameter_bytes for name, row in rows.items() if row.parameter_bytes} == {
        **weights,
        "": weights["convolution"] + weights["mlp"],
    }
    # The convolution saves its input, which was there. The MLP saves its own, and what GELU was given and returned.
    assert {name: row.activation_bytes for name, row in rows.items()} == {
        "": 2 * (made + 2 * wide),
        "convolution": 0,
        "mlp": 2 * (made + 2 * wide),
        "mlp.0": 2 * (made + 0),
        "mlp.1": 2 * wide,
        "mlp.2": 2 * wide,
    }
    assert {name: row.calls for name, row in rows.items()} == {
        "": 1, "convolution": 1, "mlp": 2, "mlp.0": 2, "mlp.1": 2, "mlp.2": 2,
    }  # fmt: skip
    assert rows["mlp.0"].inputs == ((4, 8, 64),)
    assert rows["mlp.0"].outputs == ((4, 8, 128),)
    assert rows["mlp"].peak_bytes == made + 2 * wide
    assert profile.forward_peak_bytes == 3 * made + 4 * wide
    assert profile.gradient_bytes == profile.parameter_bytes == rows[""].parameter_bytes
    assert profile.activation_bytes == rows[""].activation_bytes
    assert (profile.seconds is not None) == data
    assert all((row.seconds is not None) == data for row in profile.modules)


def test_measured_and_rehearsed_profiles_are_the_same_bytes() -> None:
    model, images = NETS["convolutions"](), torch.randn(1, 3, 32, 32)
    measured, rehearsed = profile_memory(model, images), profile_memory(model, images.to("meta"), data=False)
    for one, other in zip(measured.modules, rehearsed.modules, strict=True):
        assert (one.name, one.activation_bytes, one.peak_bytes) == (
            other.name,
            other.activation_bytes,
            other.peak_bytes,
        )
    assert measured.peak_bytes == rehearsed.peak_bytes
    assert measured.peaks == rehearsed.peaks


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_are_counted_in_the_forward_alone(reentrant: bool) -> None:
    model, x = Blocks(3, checkpointed=True, reentrant=reentrant), torch.randn(256, 64, requires_grad=True)
    measured, rehearsed = profile_memory(model, x), profile_memory(model, x, data=False)
    assert {row.calls for row in measured.modules} == {1}
    assert measured.activation_bytes == rehearsed.activation_bytes < profile_memory(Blocks(3), x).activation_bytes / 5
    assert measured.peak_bytes == rehearsed.peak_bytes
    assert x.grad is None


@pytest.mark.long_form
def test_the_peak_is_what_a_process_really_takes() -> None:
    command = [sys.executable, "-m", "tests.stages.finetune.high_water"]
    process = subprocess.run(command, env=with_tests(), capture_output=True, text=True, check=True)
    for name, (profiled, measured) in json.loads(process.stdout).items():
        assert measured > 10**8, name
        assert profiled == pytest.approx(measured, rel=0.05), name


def test_a_forward_without_gradients_saves_nothing() -> None:
    model, images = TwoWays(), torch.randn(4, 3, 8, 8)
    with torch.no_grad():
        for data in (True, False):
            profile = profile_memory(model, images, data=data)
            assert (profile.activation_bytes, profile.gradient_bytes) == (0, 0)
            assert profile.peak_bytes == profile.forward_peak_bytes > 0


def test_an_input_that_was_computed_keeps_its_graph() -> None:
    weight = torch.ones(4, requires_grad=True)
    x = torch.ones(8, 4) * weight
    for data in (True, False):
        profile_memory(nn.Linear(4, 4), x, data=data)
    assert weight.grad is None
    x.sum().backward()
    assert weight.grad is not None


def test_a_loss_counts() -> None:
    model, images = TwoWays(), torch.randn(4, 3, 8, 8)
    without = profile_memory(model, images)
    squared = profile_memory(model, images, loss=lambda made: functional.mse_loss(made * 2, torch.zeros_like(made)))
    assert squared.peak_bytes > without.peak_bytes
    assert squared.activation_bytes == without.activation_bytes


def test_the_model_is_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    x = torch.ones(8, 4, requires_grad=True)
    model(x).sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [parameter.grad.clone() for parameter in (*model.parameters(), x)]
    state = torch.random.get_rng_state()
    profile_memory(model, x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(one.grad, grad) for one, grad in zip((*model.parameters(), x), gradients, strict=True))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("home", ["disk", 0])
def test_a_model_that_streams_is_profiled_as_it_is(home: Any, tmp_path: Path) -> None:
    x = torch.randn(3, 64, requires_grad=True)
    plain = profile_memory(net(), x)
    setup = Setup(net(), lambda name: home, tmp_path)
    try:
        for data in (True, False):
            profile = profile_memory(setup.model, x, data=data)
            assert profile.parameter_bytes == plain.parameter_bytes
            assert {row.name: row.calls for row in profile.modules} == {row.name: row.calls for row in plain.modules}
            assert profile.gradient_bytes == 0
            assert profile.peaks is not None
            assert data or profile.peak_bytes == plain.peak_bytes
        assert setup.model(x).requires_grad
    finally:
        setup.streamer.remove()


def test_a_profile_without_data_needs_weights_and_inputs_of_none() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(2**16, 2**16), nn.GELU(), nn.Linear(2**16, 8)), torch.empty(2**10, 2**16)
    profile = profile_memory(model, x, data=False)
    assert profile.activation_bytes == 2 * 2**26 * FLOAT
    assert profile.peak_bytes > profile.parameter_bytes > 17 * 10**9


class Stubborn(nn.Module):
    """Code that no rehearsal can run: it asks for what was computed from weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.layer(x)
        return made * made.mean().item()


def test_a_model_that_needs_values_is_measured_and_says_why_it_predicts_nothing() -> None:
    profile = profile_memory(Stubborn(), torch.ones(3, 4))
    assert profile.peak_bytes > profile.gradient_bytes > 0
    with pytest.raises(ConfigError, match=r"can't be traced with fake tensors: .*give a number from 0 to 1"):
        least_ratio(profile, "1GB")
    with pytest.raises(ConfigError, match=r"Stubborn can't be run without data: .*data=True"):
        profile_memory(Stubborn(), torch.ones(3, 4), data=False)


def test_the_least_ratio_fits_and_one_less_does_not() -> None:
    profile = profile_memory(NETS["convolutions"](), torch.empty(4, 3, 64, 64, device="meta"), data=False)
    assert profile.peaks is not None
    budget = (profile.peak_bytes + profile.peaks.peak(1.0)) // 2
    ratio = least_ratio(profile, budget)
    assert 0 < ratio < 1
    assert profile.peaks.peak(ratio) <= budget < profile.peaks.peak(ratio - 0.001)
    assert least_ratio(profile, f"{profile.peak_bytes} B") == 0
    with pytest.raises(BudgetError, match=f"give it {profile.peaks.peak(1.0)} bytes or more"):
        least_ratio(profile, 1000)


def test_the_table_has_a_row_a_module_and_the_totals() -> None:
    profile = profile_memory(TwoWays(), torch.randn(4, 3, 8, 8))
    lines = str(profile).splitlines()
    assert lines[0].split() == [
        "module", "type", "parameters", "activations", "calls", "inputs", "outputs", "peak", "forward",
    ]  # fmt: skip
    assert [line.split()[0] for line in lines[1:7]] == ["convolution", "mlp", "mlp.0", "mlp.1", "mlp.2", "in"]
    assert "4x3x8x8" in lines[1]
    assert lines[7].split()[:2] == ["a", "step:"]
    assert "with activation offload 0.1:" in lines[8]
    assert len(profile.table(1).rows) == 2


def test_the_json_has_all_of_it() -> None:
    profile = profile_memory(TwoWays(), torch.randn(4, 3, 8, 8), data=False)
    fields = json.loads(profile.json())
    assert fields["modules"][1]["name"] == "convolution"
    assert fields["modules"][1]["type"] == "Conv2d"
    assert fields["modules"][1]["inputs"] == [[4, 3, 8, 8]]
    assert fields["activation_bytes"] == profile.activation_bytes
    assert fields["seconds"] is None
    assert fields["peak_by_ratio"]["0.0"] == profile.peak_bytes
