"""Calls in lockstep that sample on a real accelerator: each draws what it draws alone."""

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import offstage

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
]


def test_samples_are_those_of_each_call_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, vocab_size=96,
        eos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "checkpoint")
    prompts = [torch.tensor([row], device="cuda") for row in ([5, 6, 7], [8, 9], [10])]
    placed = {"model.layers": "cpu", "model.embed_tokens": 0, "model.norm": 0, "model.rotary_emb": 0, "lm_head": 0}
    with offstage.load(tmp_path / "checkpoint", device_map=placed, cache=tmp_path) as loaded:
        answer = partial(loaded.model.generate, do_sample=True, top_k=0, max_new_tokens=12)

        def sampled(size: int) -> list[torch.Tensor]:
            torch.manual_seed(3)
            return offstage.lockstep(loaded.model, [partial(answer, prompt) for prompt in prompts], size=size)

        alone, together = sampled(1), sampled(3)
    assert all(map(torch.equal, alone, together))
    assert not torch.equal(alone[0][0, -12:], alone[1][0, -12:])
