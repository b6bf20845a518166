"""Layers that compute on the host beside simulated accelerators: the same bits, since all of it computes there."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen3MoeConfig,
    T5Config,
)

import offstage
from offstage.stages.units import CPU
from tests.long_form import in_ci

PROMPTS = [torch.tensor([[3, 1, 4, 1, 5]]), torch.tensor([[9, 2, 6]]), torch.tensor([[5, 3, 5, 8, 9, 7]])]
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"vocab_size": 64, "num_hidden_layers": 6, "max_position_embeddings": 64}
NO_END: dict[str, Any] = {"eos_token_id": None, "pad_token_id": 0}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES, **NO_END),
    "tied": GPT2Config(vocab_size=64, n_embd=32, n_layer=6, n_head=4, n_positions=64, **NO_END),
    "mixture": MixtralConfig(**SIZES, num_local_experts=4, **NO_END),
    "many experts": Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2, head_dim=8, **NO_END
    ),
    "encoder-decoder": T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=4, num_heads=4, decoder_start_token_id=0, **NO_END
    ),
}
RATES = {"storage": "1GB", "host": "2MB", "host_to_device": "1MB", "device": "800GB", "launches": "1GB"}


@torch.no_grad()
@pytest.mark.parametrize("name", in_ci("llama", "many experts", "encoder-decoder", of=CONFIGS))
def test_tokens_are_those_of_the_plain_model(name: str, tmp_path: Path) -> None:
    """Every other one has a second accelerator, and some of it on disk."""
    config, is_larger = CONFIGS[name], list(CONFIGS).index(name) % 2 == 0
    accelerators, host = (2, 0.6) if is_larger else (1, 1.0)
    torch.manual_seed(0)
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    plain, checkpoint = kind.from_config(config).eval(), tmp_path / "checkpoint"
    plain.save_pretrained(checkpoint, max_shard_size="30KB")
    size = sum(parameter.nbytes for parameter in plain.parameters())
    budgets = dict.fromkeys(range(accelerators), size // 4) | {"cpu": int(host * size)}
    hardware = {"devices": [{"memory": "100MB"}] * accelerators, "rates": RATES}
    options: dict[str, Any] = {"max_memory": budgets, "hardware": hardware, "execution": "fastest", "max_length": 64}
    with offstage.load(checkpoint, cache=tmp_path / "cache", **options) as loaded:
        computing = set(loaded.plan.execution.values())
        assert loaded.plan.host_layers
        assert computing > {CPU}, computing
        answer = partial(loaded.model.generate, max_new_tokens=6, do_sample=False)
        expected = [plain.generate(ids, max_new_tokens=6, do_sample=False) for ids in PROMPTS]
        assert all(torch.equal(answer(ids), tokens) for ids, tokens in zip(PROMPTS, expected, strict=True))
        if not config.is_encoder_decoder:
            together = offstage.lockstep(loaded.model, [partial(answer, ids) for ids in PROMPTS], size=2)
            assert all(torch.equal(mine, tokens) for mine, tokens in zip(together, expected, strict=True))
            assert torch.equal(loaded.model(PROMPTS[0]).logits, plain(PROMPTS[0]).logits)
