"""Quantised checkpoints planned with their weights, and from nothing but their config: it is the same plan."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PretrainedConfig, Qwen3MoeConfig

from offstage.pipeline.errors import CheckpointError
from offstage.pipeline.runner import check_config
from offstage.pipeline.stage_chain import StageChain
from offstage.stages.checkpoints.quantization import quantization_of
from offstage.stages.empty_init.declared import declared_checkpoint
from offstage.stages.empty_init.model import build_model
from tests.e2e.fp8_checkpoints import CONFIGS, save_fp8
from tests.e2e.pipelines import config_for
from tests.long_form import in_ci, in_part
from tests.stages.checkpoints.codecs import (
    test_bitsandbytes as four_bits,
    test_compressed_tensors as compressed,
    test_grouped as grouped,
)
from tests.stages.dispatch.experts.packed_mixture import save_packed_mixture

SMALL = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "dtype": "bfloat16",
}  # fmt: skip
LLAMA = LlamaConfig(**SMALL)
QWEN = Qwen3MoeConfig(**SMALL, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
MIXTRAL = MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2)
HOST: Mapping[str, Any] = {
    "hardware": {"devices": [], "host": {"memory": "4GB"}},
    "max_memory": {"cpu": "150kB"},
    "device_map": "disk",
}
TWO_GPUS: Mapping[str, Any] = {
    "hardware": {"devices": [{"memory": "60MB"}, {"memory": "40MB"}], "host": {"memory": "4GB"}},
    "max_memory": {0: "80kB", 1: "80kB", "cpu": "30kB"},
}


def save_compressed(folder: Path, *, scheme: str, config: PretrainedConfig = LLAMA) -> Path:
    torch.manual_seed(0)
    compressed.compress(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), scheme, folder)
    return folder


def save_four_bits(folder: Path, *, nested: bool, config: PretrainedConfig = LLAMA) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    weights, saved = folder / "model.safetensors", {}
    for name, tensor in load_file(weights).items():
        shape = (tensor.shape[0], tensor.shape[-1])
        parts = four_bits.packed(shape, nested=nested) if name.endswith("proj.weight") else {"": tensor}
        saved |= {f"{name}{part}": value for part, value in parts.items()}
    save_file(saved, weights, metadata={"format": "pt"})
    declare(folder, {**four_bits.QUANTIZATION, "bnb_4bit_use_double_quant": nested})
    return folder


def save_grouped(folder: Path, *, kind: str) -> None:
    torch.manual_seed(0)
    grouped.quantise(AutoModelForCausalLM.from_config(LLAMA, dtype=torch.bfloat16), grouped.KINDS[kind], folder)


def declare(folder: Path, quantization: Mapping[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": dict(quantization)}))


MAKE: Mapping[str, Callable[[Path], object]] = {
    **{f"FP8 {name}": partial(save_fp8, config=config) for name, config in CONFIGS.items()},
    "FP8 by matrices": partial(save_fp8, config=CONFIGS["llama"], block=None),
    "FP8 but for some": partial(
        save_fp8, config=CONFIGS["qwen3_moe"], modules_to_not_convert=["lm_head", "model.layers.0.mlp.gate"]
    ),
    "FP8 of experts under other names": partial(save_fp8, config=MIXTRAL),
    "MXFP4": save_packed_mixture,
    **{name: partial(save_compressed, scheme=name) for name in compressed.SCHEMES},
    "INT4 of a mixture": partial(save_compressed, scheme="INT4 by groups", config=QWEN),
    "NF4": partial(save_four_bits, nested=False),
    "NF4, scales packed": partial(save_four_bits, nested=True),
    **{kind: partial(save_grouped, kind=kind) for kind in ("GPTQ, one group", "GPTQ of 3 bits, reordered", "AWQ")},
}


def planned(checkpoint: Path, outputs: Path, **changes: Any) -> dict[str, Any]:
    """Return the artifacts of a plan: the skeleton's tensors, the plan, the map."""
    given = {"storage": {"io": "auto", "codec": "none"}, "stages": ["empty_init", "plan"], **changes}
    config = config_for(checkpoint, outputs, **given)
    chain = StageChain(check_config(config), config, cache=outputs / "cache")
    for name in chain.stages:
        chain.obtain(name)
    skeleton, plan = (chain.artifact(name) for name in ("empty_init", "plan"))
    return {
        "skeleton": skeleton.json("skeleton.json"),
        "plan": plan.json("plan.json"),
        "device_map": plan.json("device_map.json"),
    }


MACHINES = {"host": HOST, "two GPUs": TWO_GPUS}
IN_CI = [
    *product(set(MAKE) - {"FP8 llama", "FP8 qwen3_moe", "FP8 by tensors", "INT8 by tensors"}, ["host"]),
    *product(["FP8 deepseek_v3", "MXFP4", "INT4 of a mixture", "NF4"], ["two GPUs"]),
]
"""What is left out lies as one of the others does: its blocks, experts or strategy, and what devices unpack."""


@pytest.mark.parametrize(("kind", "machine"), in_ci(*IN_CI, of=product(MAKE, MACHINES)))
def test_a_plan_from_the_config_alone_is_that_of_the_weights(kind: str, machine: str, tmp_path: Path) -> None:
    whole, alone = tmp_path / "whole", tmp_path / "alone"
    MAKE[kind](whole)
    alone.mkdir()
    shutil.copy(whole / "config.json", alone)
    expected, of_config = (planned(folder, folder / "outputs", **MACHINES[machine]) for folder in (whole, alone))
    assert of_config["skeleton"] == expected["skeleton"]
    assert of_config["device_map"] == expected["device_map"]
    assert of_config["plan"] == expected["plan"]
    lines = [line for alike in of_config["plan"]["layers"] for line in alike["lines"]]
    assert any("codec" in line for line in lines) or machine != "host"


PUBLISHED = Path(__file__).parent / "configs"
BY_HAND = {
    # 68,451,041,280 values of linear layers, a float32 for each 128 x 128 of them, all else in two bytes
    "llama-70b-fp8": 72_673_083_392,
    # 19,110,297,600 values of experts at 17 bytes for 32, all else in two bytes
    "gpt-oss-20b": 13_761_264_768,
    # as the makers' files, 688.6 GB, without the layer that guesses tokens, which the model doesn't have
    "deepseek-v3": 673_150_582_112,
}


ROUTERS = {"deepseek-v3": 2 * 58 * 256 * (7168 + 1)}
"""What more there is where transformers (from 5.24 on) has routers and their biases in float32, not in bfloat16."""


@pytest.mark.parametrize("name", in_part(BY_HAND))
def test_published_sizes_are_those_of_arithmetic(name: str, tmp_path: Path) -> None:
    shutil.copy(PUBLISHED / f"{name}.json", tmp_path / "config.json")
    model = build_model({"kind": "pretrained", "path": str(tmp_path)}, "bfloat16")
    quantization = quantization_of(tmp_path)
    assert quantization is not None
    declared = declared_checkpoint(model, tmp_path, quantization, dtype="bfloat16", adapted=False)
    total = sum(entry.bytes for entry in declared.checkpoint.entries.values())
    assert total - BY_HAND[name] in (0, ROUTERS.get(name))


SHORT = {"quant_method": "fp8", "weight_block_size": [16, 16]}
REFUSED: Mapping[str, tuple[dict[str, Any], str]] = {
    "blocks of nothing": ({**SHORT, "weight_block_size": [0, 16]}, "two numbers above 0 belong here"),
    "experts in FP4": ({**SHORT, "expert_dtype": "fp4"}, "how experts in fp4 lie is told by the weights alone"),
    "a pattern without end": (
        {**SHORT, "modules_to_not_convert": ["(.*)*x" * 9]},
        "finding the modules that it leaves out takes more than",
    ),
    "a pattern that is none": ({**SHORT, "modules_to_not_convert": ["("]}, "is no pattern"),
}


@pytest.mark.parametrize("case", in_part(REFUSED))
def test_a_config_that_does_not_say_how_weights_lie_is_refused(case: str, tmp_path: Path) -> None:
    quantization, words = REFUSED[case]
    LLAMA.save_pretrained(tmp_path / "alone")
    declare(tmp_path / "alone", quantization)
    with pytest.raises(CheckpointError, match=words):
        planned(tmp_path / "alone", tmp_path / "outputs", **HOST)


def test_whatever_needs_the_weights_says_that_they_are_missing(tmp_path: Path) -> None:
    LLAMA.save_pretrained(tmp_path / "alone")
    declare(tmp_path / "alone", SHORT)
    with pytest.raises(CheckpointError, match="no weights here"):
        planned(tmp_path / "alone", tmp_path / "outputs", **{**HOST, "stages": ["empty_init", "plan", "shard_load"]})


def test_a_plan_is_made_anew_once_the_weights_are_there(tmp_path: Path) -> None:
    save_fp8(tmp_path / "whole", CONFIGS["llama"], modules_to_not_convert=[])  # and yet the head is as it was
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(tmp_path / "whole" / "config.json", alone)
    before = planned(alone, tmp_path / "outputs", **HOST)
    for file in (tmp_path / "whole").iterdir():
        shutil.copy(file, alone)
    after = planned(alone, tmp_path / "outputs", **HOST)
    packed = [
        {tensor["name"] for tensor in each["skeleton"]["tensors"] if tensor["packed"]} for each in (before, after)
    ]
    assert packed[0] - packed[1] == {"lm_head.weight"}
