"""Which weights are quantised: linear layers and experts that repeat, and neither what is beside nor what routes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from offstage.pipeline.errors import ConfigError
from offstage.stages.checkpoints.quantised_copy import QuantisedCopy
from offstage.stages.empty_init.declared import declared_copy

SMALL = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
HALF = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}
KINDS: Mapping[str, tuple[Any, dict[str, Any], set[str]]] = {
    "dense": (transformers.LlamaConfig, {}, ATTENTION | MLP),
    "mixture": (
        transformers.Qwen2MoeConfig,
        {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 32,
        },
        ATTENTION | MLP,
    ),
    "experts under other names": (
        transformers.MixtralConfig,
        {"num_local_experts": 64, "num_experts_per_tok": 2},
        ATTENTION | {"w1", "w2", "w3"},
    ),
    "router of its own module": (
        transformers.GraniteMoeConfig,
        {"num_local_experts": 64, "num_experts_per_tok": 2},
        ATTENTION | {"input_linear", "output_linear"},
    ),
    "low ranks": (
        transformers.DeepseekV3Config,
        {
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_group": 2, "topk_group": 2,
            "first_k_dense_replace": 1, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16, "v_head_dim": 32,
        },
        {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"} | MLP,
    ),
}  # fmt: skip


def copy_of(config: Any, kind: str, *, make: Any = transformers.AutoModelForCausalLM) -> QuantisedCopy:
    with torch.device("meta"):
        model = make.from_config(config, dtype=torch.bfloat16)
    copy = declared_copy(model, Path("nowhere"), kind, adapted=False).checkpoint.copy
    assert copy is not None
    return copy


@pytest.mark.parametrize("name", KINDS)
def test_linear_layers_and_experts_of_the_layers_that_repeat(name: str) -> None:
    kind, options, expected = KINDS[name]
    options = {**SMALL, "intermediate_size": 128, "num_key_value_heads": 4, **options}
    copy = copy_of(kind(**options), "q8_0")
    assert {weight.removesuffix(".weight").rpartition(".")[2] for weight in copy.quantised} == expected
    rest = {weight for weight in copy.sources if weight not in copy.quantised}
    assert all(
        len(copy.sources[weight].shape) == 1 or any(part in weight for part in ("embed", "lm_head", "gate", "router"))
        for weight in rest
    )


def test_weights_that_a_class_keeps_in_float32_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.T5Config(vocab_size=96, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
    copy = copy_of(config, "q8_0", make=transformers.AutoModelForSeq2SeqLM)
    quantised_names = {weight.removesuffix(".weight").rpartition(".")[2] for weight in copy.quantised}
    assert quantised_names == {"q", "k", "v", "o", "wi"}


def test_rows_that_are_no_whole_blocks_stay() -> None:
    config = transformers.LlamaConfig(**SMALL, intermediate_size=80, num_key_value_heads=4)
    for kind in ("q8_0", "fp8"):
        quantised_names = {
            weight.removesuffix(".weight").rpartition(".")[2] for weight in copy_of(config, kind).quantised
        }
        assert quantised_names == ATTENTION | {"gate_proj", "up_proj"}


def test_a_model_without_such_layers_is_refused() -> None:
    config = transformers.GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4)
    with pytest.raises(
        ConfigError, match=r"model\.quantize: 'q8_0' is of no use, no linear layer that repeats in GPT2"
    ):
        copy_of(config, "q8_0")
