"""What plans of an FP8 checkpoint say is what comes: the same answer, and the bytes that were predicted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, LlamaConfig
from transformers.integrations.finegrained_fp8 import Fp8Quantize

import offstage
from offstage.stages.plan.table import packed_bytes
from tests.stages.dispatch.experts.packed_mixture import save_packed_mixture

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=256, intermediate_size=384, num_attention_heads=4, num_key_value_heads=2,
    num_hidden_layers=6, dtype="bfloat16", architectures=["LlamaForCausalLM"],
)  # fmt: skip
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
WEIGHT_BYTES = 2 * 6 * (256 * 256 * 2 + 256 * 128 * 2 + 3 * 256 * 384)
SLOW_STORAGE = {"storage": "1MB", "host": "100GB", "host_to_device": "100GB", "device": "100GB", "dequantising": "1GB"}
SLOW_CORES = {**SLOW_STORAGE, "storage": "1GB", "dequantising": "1MB"}
SMALL = [{"name": "small", "memory": "100MB"}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8")
    torch.manual_seed(0)
    settings = FineGrainedFP8Config(modules_to_not_convert=["lm_head"])
    quantiser = Fp8Quantize(SimpleNamespace(quantization_config=settings))
    saved: dict[str, torch.Tensor] = {}
    for name, tensor in AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16).state_dict().items():
        saved |= quantiser.convert({name: tensor}) if "_proj" in name else {name: tensor}
    save_file(saved, folder / "model.safetensors", {"format": "pt"})
    CONFIG.quantization_config = settings.to_dict()
    CONFIG.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def answer_and_traffic(checkpoint: Path, cache: Path, **options: Any) -> tuple[torch.Tensor, Any, int, int]:
    """Return the logits, the plan, and the bytes streamed and read from storage for one more token."""
    with offstage.load(checkpoint, cache=cache, max_length=16, **options) as loaded, torch.inference_mode():
        logits = loaded.model(TOKENS).logits
        before = loaded.traffic.streamed_bytes
        loaded.model(TOKENS[:, :1])
        return logits, loaded.plan, loaded.traffic.streamed_bytes - before, loaded.traffic.storage_bytes


PLACES: dict[str, dict[str, Any]] = {
    "the rest on disk": {"max_memory": {"cpu": "3MB"}, "hardware": {"rates": SLOW_CORES}},
    "some packed in memory": {"max_memory": {"cpu": "3MB"}, "hardware": {"rates": SLOW_STORAGE}},
    "all packed in memory": {"max_memory": {"cpu": "4500KB"}, "hardware": {"rates": SLOW_STORAGE}},
    "packed on the host, for an accelerator": {
        "max_memory": {0: "3MB", "cpu": "2MB"}, "hardware": {"devices": SMALL, "rates": SLOW_STORAGE},
    },
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_a_plan_predicts_the_bytes_of_what_rests_packed_exactly(place: str, checkpoint: Path, cache: Path) -> None:
    expected, whole, *_ = answer_and_traffic(checkpoint, cache, max_memory={"cpu": "100MB"})
    assert not whole.serving
    logits, plan, streamed, stored = answer_and_traffic(checkpoint, cache, storage={"io": "direct"}, **PLACES[place])
    assert torch.equal(logits, expected)
    assert streamed == plan.forecast["streamed_bytes_per_token"]
    assert ("packed" in plan.serving.values()) == (place != "the rest on disk")
    resident, budget = plan.devices["cpu"].weights, plan.budgets["cpu"]
    assert budget is not None
    assert resident + plan.devices["cpu"].reserve <= budget
    if place == "all packed in memory":
        assert stored == 0
        assert set(packed_bytes(plan)["fp8"]) == {"used", "cpu"}
        assert plan.devices["cpu"].weights > 0.5 * WEIGHT_BYTES


@pytest.mark.parametrize("max_memory", [{"cpu": "420KB"}, {0: "1MB", "cpu": "300KB"}], ids=["host", "accelerator"])
def test_a_mixture_answers_the_same_from_experts_that_wait_packed_in_memory(
    max_memory: dict[Any, str], tmp_path: Path, cache: Path
) -> None:
    folder = save_packed_mixture(tmp_path)
    devices = {"devices": SMALL} if 0 in max_memory else {}
    with offstage.load(folder, cache=cache, max_length=16, max_memory={"cpu": "9MB"}) as whole, torch.inference_mode():
        expected = whole.model(TOKENS).logits
    options: dict[str, Any] = {"max_memory": max_memory, "hardware": {**devices, "rates": SLOW_STORAGE}}
    with offstage.load(folder, cache=cache, max_length=16, **options) as loaded, torch.inference_mode():
        logits, plan = loaded.model(TOKENS).logits, loaded.plan
    assert torch.equal(logits, expected)
    stacks = {name for name, how in plan.serving.items() if how == "experts" and not name.endswith("bias")}
    assert set(plan.loading.packed_on_host) == stacks
    assert len(stacks) == 2 * 3
