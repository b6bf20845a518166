"""GPTQ and AWQ checkpoints: whatever lies where, logits and tokens are those of the plain model with what they mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.e2e.conftest import Finished
from tests.e2e.pipelines import dispatched_model
from tests.e2e.test_same_answer import answers
from tests.long_form import in_ci
from tests.stages.checkpoints.codecs import test_grouped as grouped

CONFIG = LlamaConfig(
    vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, dtype="float16", eos_token_id=None,
)  # fmt: skip
MIXED = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": "cpu", "model.layers.2": "disk"}
REST = {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
TWO: dict[str, Any] = {"hardware": {"devices": [{"memory": "2GB"}]}, "max_memory": {0: "1GB", "cpu": "1GB"}}


def save(folder: Path, kind: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float16).eval()
    return grouped.quantise(model, grouped.KINDS[kind], folder)


KINDS = ("GPTQ, zeros less one", "GPTQ of 3 bits, reordered", "GPTQ of 8 bits", "AWQ")


@pytest.mark.long_form
@pytest.mark.parametrize("kind", in_ci("GPTQ of 3 bits, reordered", of=KINDS))
def test_any_placement_gives_the_answer_of_the_plain_model(kind: str, tmp_path: Path) -> None:
    expected = answers(save(tmp_path / "packed", kind))
    for placement in ("cpu", "disk", MIXED | REST):
        given = TWO if isinstance(placement, dict) else {"max_memory": {"cpu": "1GB"}}
        if placement == "cpu":
            placement = {"": "cpu"}
        model = dispatched_model(
            tmp_path / "packed", tmp_path / "outputs", device_map=placement, storage={"io": "direct"}, **given
        )
        for got, wanted in zip(answers(model), expected, strict=True):
            assert torch.equal(got, wanted), placement


def test_a_group_that_is_not_there_is_one_line_and_exit_3(
    tmp_path: Path, offstage_here: Callable[..., Finished]
) -> None:
    save(tmp_path / "packed", "GPTQ, reordered")
    name = "model.layers.1.mlp.up_proj.g_idx"
    index = json.loads((tmp_path / "packed" / "model.safetensors.index.json").read_text())
    file = tmp_path / "packed" / index["weight_map"][name]
    tensors = load_file(file)
    tensors[name] = tensors[name] + 100
    save_file(tensors, file, metadata={"format": "pt"})
    finished = offstage_here("model=pretrained", f"model.path={tmp_path / 'packed'}", "stages=plan_only")
    assert finished.code == 3
    assert f"tensor {name!r} has 100 to 101, where groups are 0 to 1" in finished.err
    assert len(finished.err.strip().splitlines()) == 1
