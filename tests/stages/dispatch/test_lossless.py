"""A model whose weights rest packed losslessly answers bit for bit as the one in memory, wherever they lie."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import offstage
from offstage.stages.plan.table import packed_bytes
from tests.long_form import in_ci

SIZES = {"vocab_size": 320, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS: Mapping[str, Any] = {
    "llama": transformers.LlamaConfig(**SIZES, intermediate_size=256, num_key_value_heads=2),
    "gpt2": transformers.GPT2Config(vocab_size=320, n_embd=128, n_layer=2, n_head=4, n_positions=64),
    "opt": transformers.OPTConfig(**SIZES, ffn_dim=256, word_embed_proj_dim=128, max_position_embeddings=64),
    "qwen2": transformers.Qwen2Config(
        **SIZES, intermediate_size=256, num_key_value_heads=2, tie_word_embeddings=True, use_sliding_window=False
    ),
    "mixtral": transformers.MixtralConfig(
        **SIZES, intermediate_size=128, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2
    ),
}
DTYPES = {"gpt2": torch.float32, "opt": torch.float16}
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])
BUDGETS: Mapping[str, dict[Any, float]] = {
    "on disk": {"cpu": 0.45},
    "some packed on the host": {"cpu": 0.75},
    "an accelerator": {0: 0.6, "cpu": 0.1},
}
"""Shares of the weights' bytes that devices may hold."""
DRAWN = int(os.environ.get("OFFSTAGE_GRID", "0"))
"""``OFFSTAGE_GRID=40`` draws so many budgets for each model."""


def drawn(name: str) -> list[dict[Any, float]]:
    draw = random.Random(name)
    shares = [(draw.uniform(0.45, 1), draw.uniform(0, 1)) for _ in range(DRAWN)]
    return [{0: first, "cpu": second} if draw.random() < 0.5 else {"cpu": first} for first, second in shares]


def options_of(budget: Mapping[Any, float], model: Any) -> dict[str, Any]:
    size = sum(parameter.nbytes for parameter in model.parameters())
    hardware = {"devices": [{"name": "small", "memory": "100MB"}]} if 0 in budget else {}
    slow = {"rates": {"storage": "10MB"}}
    limits = {device: str(int(size * share)) for device, share in budget.items()}
    return {"max_memory": limits, "hardware": {**hardware, **slow}, "storage": {"codec": "zstd"}}


@pytest.fixture(scope="module", params=in_ci("gpt2", "mixtral", of=CONFIGS))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(deepcopy(CONFIGS[request.param]), dtype=torch.float32)
    model = model.to(DTYPES.get(request.param, torch.bfloat16)).eval()
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder / "checkpoint")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "checkpoint", dtype="auto")
    return request.param, folder, model.eval()


def answers(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.inference_mode():
        return model(TOKENS).logits, model.generate(TOKENS, max_new_tokens=4, do_sample=False, pad_token_id=0)


def test_tokens_and_logits_are_those_of_the_model_in_memory(saved: tuple[str, Path, Any]) -> None:
    name, folder, model = saved
    expected = answers(model)
    served = set()
    for budget in (*BUDGETS.values(), *drawn(name)):
        options = {**options_of(budget, model), "cache": folder / "cache", "max_length": 16, "batch_size": 2}
        with offstage.load(folder / "checkpoint", **options) as loaded:
            streamed = answers(loaded.model)
            served |= set(loaded.plan.serving.values()) if "zstd" in packed_bytes(loaded.plan) else set()
        assert torch.equal(streamed[0], expected[0]), budget
        assert torch.equal(streamed[1], expected[1]), budget
    assert served >= ({"experts"} if name == "mixtral" else {"direct", "packed"})


def test_bytes_streamed_are_those_at_rest_and_a_second_load_packs_nothing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = deepcopy(CONFIGS["llama"])
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "checkpoint")
    options = {"cache": tmp_path / "cache", "max_length": 16, "max_memory": {"cpu": "200KB"}}
    streamed = {}
    for codec in ("none", "zstd", "zstd"):
        with offstage.load(tmp_path / "checkpoint", **options, storage={"codec": codec, "io": "direct"}) as loaded:
            loaded.model(TOKENS[:, :1])
            streamed[codec] = loaded.traffic.streamed_bytes
            predicted = loaded.plan.forecast["streamed_bytes_per_token"]
        assert streamed[codec] == pytest.approx(predicted, rel=0.03)
        written = {path.stat().st_mtime_ns for path in tmp_path.rglob("*.zstd.dat")}
        assert bool(written) == (codec == "zstd")
    assert streamed["zstd"] < 0.75 * streamed["none"]
