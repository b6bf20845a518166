"""Layers that compute on the host beside a real accelerator: near the plain model's answer, each cache in its place."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig

import offstage
from offstage.stages.calls.results import kept_cache
from offstage.stages.units import CPU

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
]

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"vocab_size": 128, "num_hidden_layers": 6, "max_position_embeddings": 64}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES),
    "tied, with embedded positions": GPT2Config(vocab_size=128, n_embd=64, n_layer=6, n_head=4, n_positions=64),
    "mixture": MixtralConfig(**SIZES, num_local_experts=4),
}
RATES = {"storage": "1GB", "host": "2MB", "link": "1MB", "device": "800GB", "launches": "1GB"}


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_the_answer_is_that_of_the_plain_model_but_for_the_last_bits(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    plain.save_pretrained(tmp_path / "checkpoint")
    size, ids = sum(parameter.nbytes for parameter in plain.parameters()), torch.tensor([[3, 1, 4, 1, 5]])
    options: dict[str, Any] = {"max_memory": {0: size // 4, "cpu": size}, "hardware": {"rates": RATES}}
    with offstage.load(tmp_path / "checkpoint", cache=tmp_path, execution="fastest", **options) as loaded:
        assert set(loaded.plan.execution.values()) == {0, CPU}
        first = loaded.model(ids.cuda(), use_cache=True)
        assert first.logits.device == torch.device("cuda:0")
        blocks = [name for name in loaded.plan.reasons if name.rpartition(".")[2].isdecimal()]
        cache_devices = {layer.keys.device.type for cache in kept_cache(first).values() for layer in cache.layers}
        assert cache_devices == {"cpu" if block in loaded.plan.host_layers else "cuda" for block in blocks}
        torch.testing.assert_close(first.logits.cpu(), plain(ids).logits, rtol=1e-3, atol=1e-3)
        more = torch.tensor([[9]])
        second = loaded.model(more.cuda(), **kept_cache(first)).logits.cpu()
        whole = plain(torch.cat([ids, more], dim=1)).logits[:, -1:]
        torch.testing.assert_close(second, whole, rtol=1e-3, atol=1e-3)
