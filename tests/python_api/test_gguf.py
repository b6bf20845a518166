"""Models in GGUF files: the tokens that transformers gets of them, wherever the weights lie."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import offstage
from offstage.stages.checkpoints.checkpoint import open_checkpoint

pytest.importorskip("gguf")

from tests.packed_references import without_asking_for_accelerate
from tests.python_api.rates import RATES
from tests.stages.checkpoints.test_gguf_entries import made

PROMPT = "On the stern a sail is set."
UNREAD = ("token_embd.weight", "rope_freqs.weight")
"""Looked up by rows; no tensor of the model."""


ON_DISK = {"": 0, "model.layers": "disk"}
TIERS: Mapping[str, dict[str, Any]] = {
    "in memory": {"device_map": {"": "cpu"}},
    "in memory and on disk": {"device_map": "sequential", "max_memory": {"cpu": "9MB"}},
    "on disk": {"device_map": {"": "disk"}},
    "from disk to an accelerator": {"device_map": ON_DISK, "max_memory": {0: "20MB", "cpu": "9MB"}},
    "from the host to an accelerator": {"device_map": {**ON_DISK, "model.layers": "cpu"}},
}
DEVICES = [{"name": "small", "memory": "40MB"}]


@pytest.mark.parametrize(
    ("architecture", "tier"),
    [*(("llama", tier) for tier in TIERS), ("qwen2", "in memory"), ("qwen3moe", "in memory and on disk")],
)
def test_the_tokens_are_those_of_the_model_that_transformers_unpacks(
    tmp_path: Path, architecture: str, tier: str
) -> None:
    path = made(tmp_path, architecture)
    with without_asking_for_accelerate():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name)
    asked = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)(PROMPT, return_tensors="pt")
    wanted = theirs.generate(**asked, max_new_tokens=6, do_sample=False)
    hardware = {"rates": RATES, **({"devices": DEVICES} if "accelerator" in tier else {})}
    with offstage.load(path, hardware=hardware, max_length=32, **TIERS[tier]) as loaded:
        again = loaded.tokenizer(PROMPT, return_tensors="pt")
        assert torch.equal(again.input_ids, asked.input_ids)
        assert {tensor.dtype for tensor in loaded.model.state_dict().values()} == {torch.float32}
        got = loaded.model.generate(**again, max_new_tokens=6, do_sample=False)
        streamed, forecast = loaded.traffic.streamed_bytes, loaded.plan.forecast
    assert torch.equal(got, wanted)
    if tier == "on disk":
        entries = open_checkpoint(path).entries
        at_rest = sum(entry.bytes for name, entry in entries.items() if name not in UNREAD)
        passes = got.shape[1] - asked.input_ids.shape[1]
        assert streamed == passes * at_rest == passes * forecast["streamed_bytes_per_token"]
