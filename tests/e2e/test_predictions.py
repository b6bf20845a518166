"""The plan's promise: long prompts take what was predicted, not only short ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig, PretrainedConfig

from tests.e2e.conftest import Finished

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(hidden_size=512, intermediate_size=2048, num_hidden_layers=3, num_attention_heads=8,
                         num_key_value_heads=2, vocab_size=16000),
    "opt": OPTConfig(hidden_size=512, ffn_dim=2048, num_hidden_layers=3, num_attention_heads=8, vocab_size=16000,
                     word_embed_proj_dim=512, max_position_embeddings=4096),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_long_prompts_peak_is_predicted_within_a_tenth(
    name: str, tmp_path: Path, offstage: Callable[..., Finished]
) -> None:
    folder = tmp_path / "checkpoint"
    AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.bfloat16).save_pretrained(folder)
    prompts = [[7] * 1800, [9] * 1500, [5] * 10]
    done = offstage(
        f"model.path={folder}", "max_memory.cpu=500MB", "storage.io=direct", f"generate.prompts={prompts}",
        "generate.max_new_tokens=2", "generate.min_new_tokens=2",
    )  # fmt: skip
    assert done.code == 0, done.err
    predicted, measured = (done.record["memory"][kind]["cpu"] for kind in ("predicted", "measured"))
    parts = json.loads(Path(done.record["stages"][1]["artifact"], "plan.json").read_text())["predicted"]["cpu"]
    request = sum(parts[name] for name in ("cache", "activations", "scratch"))
    assert request > 0.2 * predicted, "the prompts take too little for the test to prove anything"
    assert predicted == pytest.approx(measured, rel=0.1)
