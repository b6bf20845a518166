"""Packed checkpoints on simulated accelerators: the same answers, and the links bring packed bytes, as planned."""

import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen3MoeConfig

import offstage
from offstage.pipeline.errors import BudgetError
from tests.e2e.fp8_checkpoints import save_fp8
from tests.long_form import in_ci
from tests.stages.dispatch.experts.packed_mixture import save_packed_mixture
from tests.stages.plan.plans import of

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 36, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "vocab_size": 96, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
MIXTURE = {**SIZES, "num_hidden_layers": 12, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
FP8: Mapping[str, PretrainedConfig] = {"llama": LlamaConfig(**SIZES), "qwen3_moe": Qwen3MoeConfig(**MIXTURE)}
RATES = {"storage": "1GB", "host": "10GB", "host_to_device": "100MB", "device": "100GB", "dequantising": "1MB"}
"""Of a machine whose link is slow, and whose cores are."""

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
DRAWS = int(os.environ.get("OFFSTAGE_GRID") or 3)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module", params=in_ci("gpt-oss", of=[*FP8, "gpt-oss"]))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "gpt-oss":
        return save_packed_mixture(folder)
    return save_fp8(folder, FP8[request.param], block=(16, 16))


@pytest.fixture(scope="module")
def expected(checkpoint: Path, cache: Path) -> list[torch.Tensor]:
    with offstage.load(checkpoint, cache=cache, max_length=64) as loaded:
        return answers(loaded.model)


def answers(model: Any) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [model(TOKENS).logits, model.generate(TOKENS, max_new_tokens=4, do_sample=False)]


@pytest.mark.parametrize("accelerators", in_ci(1, of=[1, 2]))
def test_links_bring_packed_bytes_within_every_budget(checkpoint, cache, expected, accelerators: int) -> None:
    kind = checkpoint.name.rstrip("0123456789")
    chance, unpacked = random.Random(f"{kind} {accelerators}"), 0
    if kind == "gpt-oss" and accelerators == 2:
        pytest.skip("with two tables of all scales and bytes there is room for the model, which is smaller")
    least, most = (720, 860) if kind == "gpt-oss" else (760, 1400)  # a table of pairs is half a megabyte
    for _ in range(DRAWS):
        budgets: dict[Any, str] = {device: f"{chance.randint(least, most)}KB" for device in range(accelerators)}
        budgets["cpu"] = f"{chance.choice([0, 400, 3000])}KB"
        hardware = {"devices": [{"name": "small", "memory": "100MB"}] * accelerators, "rates": RATES}
        try:
            loaded = offstage.load(checkpoint, cache=cache, max_length=64, max_memory=budgets, hardware=hardware)
        except BudgetError:
            continue
        with loaded:
            unpacked += len(of(loaded.plan, "dequantising"))
            check(loaded, expected)
    assert unpacked


def check(loaded: offstage.LoadedModel, expected: list[torch.Tensor]) -> None:
    """Hold what ``loaded`` answers, brings and keeps against what is expected and planned."""
    logits, tokens = answers(loaded.model)
    assert torch.equal(logits, expected[0])
    assert torch.equal(tokens, expected[1])
    plan, before = loaded.plan, loaded.traffic.copy()
    loaded.model(TOKENS[:, :1])
    brought = {device: link.bytes for device, link in loaded.traffic.since(before).links.items() if device != "cpu"}
    if not of(plan, "pool"):
        assert brought == of(plan, "transfer_bytes")
    for device in of(plan, "dequantising"):
        at_rest = loaded.traffic.links[device].bytes == loaded.traffic.streamed_bytes
        assert at_rest or len(of(plan, "transfer_bytes")) > 1 or "copy" in plan.serving.values()
        assert loaded.plan.predicted[device]["dequantising"] == plan.devices[device].dequantising
    assert loaded.traffic.overflow_bytes == 0
    peaks = loaded._dispatched.streamer._devices.peaks
    assert all(peak <= of(plan, "simulated")[device] for device, peak in peaks.items())
