"""What a training takes where its model's code can't be rehearsed: a bound that is none too low."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig

from offstage.stages.empty_init.training_peaks import rehearse_step
from offstage.stages.plan.request.geometry import geometry_of
from offstage.stages.plan.request.training import bound_peaks

LLAMA = LlamaConfig(hidden_size=64, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4, vocab_size=500)


@pytest.mark.parametrize("config", [LLAMA, GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=500)], ids=type)
def test_the_bound_is_above_what_a_rehearsal_shows(config: PretrainedConfig) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    rows = torch.ones((4, 32), dtype=torch.long)
    shown = rehearse_step(model, lambda one: one(input_ids=rows, labels=rows, use_cache=False)).peaks
    geometry = geometry_of(config.to_dict())
    bound = bound_peaks(geometry, tokens=rows.numel(), gradient_bytes=shown.gradient_bytes)
    assert shown.peak() < bound.peak() < 4 * shown.peak()
    assert bound.peak(1.0) >= bound.peak(0.0) - bound.saved_bytes * 0.01
