"""Device maps beside accelerate's: the same for models as people have them; where not, for a reason that is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    PretrainedConfig,
    T5Config,
)

import offstage

modeling = pytest.importorskip("accelerate.utils.modeling")

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4}
LLAMA = {**SIZES, "vocab_size": 128, "num_key_value_heads": 2}
CONFIGS: Mapping[str, PretrainedConfig] = {
    "llama": LlamaConfig(**LLAMA),
    "tied": LlamaConfig(**LLAMA, tie_word_embeddings=True),
    "gpt2": GPT2Config(vocab_size=128, n_embd=64, n_layer=6, n_head=4),
    "opt": OPTConfig(
        vocab_size=128, hidden_size=64, ffn_dim=96, num_hidden_layers=6, num_attention_heads=4, word_embed_proj_dim=64
    ),
    "t5": T5Config(vocab_size=128, d_model=64, d_ff=96, num_layers=3, num_heads=4, d_kv=16),
    "mixtral": MixtralConfig(**LLAMA, num_local_experts=4),
}
ALIKE: list[dict[int | str, float]] = [
    {0: 0.5, 1: 0.5, "cpu": 2}, {0: 0.6, "cpu": 2}, {0: 2}, {"cpu": 2}, {"cpu": 0.6, "disk": 9},
]  # fmt: skip
"""Budgets in shares of the model."""


@pytest.fixture(scope="module", params=CONFIGS)
def model(request: pytest.FixtureRequest) -> Any:
    config = CONFIGS[request.param]
    with torch.device("meta"):
        auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        made = auto.from_config(config)
    made.tie_weights()
    return made


def budgets(model: nn.Module, shares: Mapping[int | str, float]) -> dict[int | str, int]:
    whole = offstage.compute_module_sizes(model)[""]
    return {device: int(share * whole) for device, share in shares.items()}


def whole_layers(model: Any) -> list[str]:
    return list(model._no_split_modules)


def bytes_on(model: nn.Module, device_map: Mapping[str, Any], device: object) -> int:
    """Return the bytes that ``device`` holds by ``device_map``."""
    sizes, total = offstage.compute_module_sizes(model), 0
    for name, _ in model.named_parameters():
        entry = max((key for key in device_map if f"{name}.".startswith(f"{key}." if key else "")), key=len)
        total += sizes[name] if device_map[entry] == device else 0
    return total


@pytest.mark.parametrize("shares", ALIKE, ids=str)
@pytest.mark.parametrize("split", [True, False], ids=["split", "whole layers"])
def test_maps_are_accelerate_s(model: Any, shares: dict[int | str, float], split: bool) -> None:
    if split and isinstance(model.config, MixtralConfig) and 0.6 in shares.values():
        pytest.skip("accelerate keeps room for one of the tensors of all experts, which are brought in together")
    most, classes = budgets(model, shares), [] if split else whole_layers(model)
    theirs = modeling.infer_auto_device_map(model, max_memory=dict(most), no_split_module_classes=list(classes))
    assert offstage.infer_auto_device_map(model, max_memory=most, no_split_module_classes=classes) == dict(theirs)


@pytest.mark.parametrize("low_zero", [False, True])
def test_balanced_budgets_leave_no_more_to_the_host_and_are_at_least_as_even(model: Any, low_zero: bool) -> None:
    most, classes = budgets(model, {0: 0.8, 1: 0.8, "cpu": 2}), whole_layers(model)
    maps = []
    for functions in (offstage, modeling):
        shares = functions.get_balanced_memory(
            model, max_memory=dict(most), no_split_module_classes=list(classes), low_zero=low_zero
        )
        assert shares["cpu"] == most["cpu"]
        assert shares[1] == most[1], "the last accelerator takes what is left"
        maps.append(functions.infer_auto_device_map(model, max_memory=shares, no_split_module_classes=list(classes)))
    own, theirs = ([bytes_on(model, one, device) for device in (0, 1)] for one in maps)
    assert sum(own) >= sum(theirs), "accelerate's low_zero sends to the host what the accelerators have room for"
    assert low_zero or max(own) <= max(theirs)


def test_the_host_keeps_no_room_of_its_own_beside_an_accelerator_s(model: Any) -> None:
    most, classes = budgets(model, {0: 0.5, "cpu": 0.4, "disk": 9}), whole_layers(model)
    own = offstage.infer_auto_device_map(model, max_memory=most, no_split_module_classes=classes)
    theirs = modeling.infer_auto_device_map(model, max_memory=dict(most), no_split_module_classes=list(classes))
    assert bytes_on(model, theirs, "cpu") <= bytes_on(model, own, "cpu") <= most["cpu"]
    assert bytes_on(model, theirs, 0) <= bytes_on(model, own, 0) <= most[0]


def test_what_else_scripts_pass_for_tied_parameters_changes_nothing(model: Any) -> None:
    tied = offstage.find_tied_parameters(model, named_parameters=None, prefix="", result={})
    assert tied == sorted(map(sorted, modeling.find_tied_parameters(model)))
