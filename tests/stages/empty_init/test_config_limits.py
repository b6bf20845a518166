"""Configs that are well-formed and absurd are refused in one line, within bounds of time and memory."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any

import pytest

import offstage.stages.empty_init.model  # noqa: F401  torch and transformers take seconds, which no test's deadline is about
from offstage.pipeline.errors import CheckpointError
from offstage.stages.empty_init.config_limits import check_numbers
from tests.deadline import deadline
from tests.e2e.pipelines import config_for, dispatched

TINY = Path(__file__).parents[3] / "conf" / "checkpoints" / "tiny"


@pytest.fixture
def config() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((TINY / "config.json").read_text())
    return content


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9), ("num_hidden_layers", 1e9), ("n_layer", 4000), ("encoder_layers", 10**6),
        ("head_dim", 10**9), ("hidden_size", 1e300), ("intermediate_size", 2**40), ("num_attention_heads", 10**9),
        ("n_embd", 10**9), ("num_experts", 10**8), ("vocab_size", 10**12), ("max_position_embeddings", 10**15),
        ("depths", [2, 2, 10**9]), ("d_model", float("inf")),
    ],
)  # fmt: skip
def test_a_number_that_no_model_has_is_refused_by_its_key(key: str, value: Any, config: dict[str, Any]) -> None:
    for given in ({**config, key: value}, {**config, "text_config": {"inner": [{key: value}]}}):
        with pytest.raises(CheckpointError, match=f"f: {key}: .* is more than any model has"):
            check_numbers(Path("f"), given)


def test_numbers_of_real_models_pass() -> None:
    largest = {
        "num_hidden_layers": 1000, "hidden_size": 20480, "intermediate_size": 106496, "head_dim": 512,
        "vocab_size": 1_300_000, "max_position_embeddings": 100_000_000, "num_experts": 4096, "rope_theta": 1e11,
        "sliding_window": 2**31, "vision_feature_layer": -2, "max_window_layers": 80, "attention_chunk_size": 2**20 + 1,
        "rms_norm_eps": 1e-6, "quantization": {"group_size": 128}, "model_max_length": 1e30,
    }  # fmt: skip
    check_numbers(Path("f"), largest)


@pytest.mark.parametrize(
    "change", [{"num_hidden_layers": 10**9}, {"head_dim": 10**9}, {"text_config": None}], ids=["layers", "head", "deep"]
)
def test_a_run_of_such_a_config_ends_at_once(change: dict[str, Any], config: dict[str, Any], tmp_path: Path) -> None:
    text = json.dumps({**config, **change})
    if "text_config" in change:
        text = text.replace("null", "[" * 50_000 + "]" * 50_000, 1)
    tmp_path.joinpath("config.json").write_text(text)
    for path in [*TINY.glob("*.safetensors"), *TINY.glob("*.index.json")]:
        tmp_path.joinpath(path.name).symlink_to(path)
    began, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = {**config_for(tmp_path, tmp_path)["model"], "allow_links": True}
    with deadline(), pytest.raises(CheckpointError, match="config"):
        dispatched(tmp_path, tmp_path / "outputs", model=model)
    assert time.process_time() - began < 10
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024 < 2**31
