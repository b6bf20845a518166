"""How the model's tensors are made from the checkpoint's is told once for sources that look alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3MoeConfig

from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.empty_init import names
from offstage.stages.empty_init.names import name_tensors
from tests.stages.empty_init.test_experts import on_meta

FILE = ShardFile("model.safetensors", Path("model.safetensors"), 0, None, "")
LAYERS, EXPERTS, HIDDEN, INNER = 5, 4, 16, 8
CONFIG = Qwen3MoeConfig(
    vocab_size=32, hidden_size=HIDDEN, intermediate_size=24, num_hidden_layers=LAYERS, num_attention_heads=2,
    num_key_value_heads=2, head_dim=8, moe_intermediate_size=INNER, num_experts=EXPERTS, num_experts_per_tok=2,
)  # fmt: skip


def expert_entries() -> dict[str, Extent]:
    """Return the experts as published checkpoints name them: three matrices each."""
    shapes = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    return {
        f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight": Extent(FILE, 0, "bfloat16", shape)
        for layer in range(LAYERS)
        for expert in range(EXPERTS)
        for part, shape in shapes.items()
    }


def test_layers_of_one_look_are_converted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    converted: list[str] = []
    whole = names.convert

    def convert(converter: Any, target: str, model: Any) -> dict[str, Any]:
        converted.append(target)
        return whole(converter, target, model)

    monkeypatch.setattr(names, "convert", convert)
    steps = name_tensors(on_meta(CONFIG), expert_entries()).steps
    assert sorted(converted) == [f"model.layers.0.mlp.experts.{part}" for part in ("down_proj", "gate_up_proj")]
    made = {name: shape for step in steps for name, shape in step.targets.items()}
    assert made == {
        f"model.layers.{layer}.mlp.experts.{part}": shape
        for layer in range(LAYERS)
        for part, shape in {"gate_up_proj": (EXPERTS, 2 * INNER, HIDDEN), "down_proj": (EXPERTS, HIDDEN, INNER)}.items()
    }
    assert all(
        str(layer) in step.source_names[0] for step in steps for layer in [next(iter(step.targets)).split(".")[2]]
    )
    assert len({id(step.converter) for step in steps}) == len(steps), "each collects sources of its own"


def test_a_layer_of_another_look_is_converted_by_itself() -> None:
    entries = expert_entries()
    for expert in range(EXPERTS):
        name = f"model.layers.3.mlp.experts.{expert}.down_proj.weight"
        entries[name] = Extent(FILE, 0, "bfloat16", (HIDDEN, INNER + 1))
    made = {
        name: shape for step in name_tensors(on_meta(CONFIG), entries).steps for name, shape in step.targets.items()
    }
    assert made["model.layers.3.mlp.experts.down_proj"] == (EXPERTS, HIDDEN, INNER + 1)
    assert made["model.layers.4.mlp.experts.down_proj"] == (EXPERTS, HIDDEN, INNER)
