"""Weights of a checkpoint whose data begin anywhere: kernels are chosen by the address, and all placements have one."""

from __future__ import annotations

import struct
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GraniteMoeConfig, LlamaConfig, PretrainedConfig

import offstage
from offstage.stages.checkpoints.safetensors_header import read_header
from offstage.stages.machine.aligned_memory import TENSOR_ALIGNMENT
from tests.long_form import in_ci

SIZES = {
    "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1003,
}  # fmt: skip
CONFIGS: dict[str, PretrainedConfig] = {
    "dense": LlamaConfig(**SIZES, intermediate_size=344),
    "stacked experts": GraniteMoeConfig(**SIZES, intermediate_size=96, num_local_experts=8, num_experts_per_tok=2),
    # Norms of 400 bytes lie between its layers: the stacks of each begin elsewhere.
    "stacks that begin unlike": GraniteMoeConfig(
        **{**SIZES, "hidden_size": 100, "num_attention_heads": 2, "num_key_value_heads": 1},
        intermediate_size=96,
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
}
PLACES: dict[str, dict[str, Any]] = {
    "no budget": {},
    "a part on disk": {"max_memory": {"cpu": "1.5MB"}, "hardware": {"devices": []}},
    "all on disk": {"device_map": "disk", "storage": {"io": "direct"}},
    "mapped": {"device_map": "disk", "storage": {"io": "mmap"}},
}


def shifted(path: Path, offset: int) -> None:
    """Have the data of the safetensors file at ``path`` begin ``offset`` bytes past a multiple of 64."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = raw[8 : 8 + length].rstrip()
    header += b" " * ((offset - 8 - len(header)) % TENSOR_ALIGNMENT)
    path.write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + length :])


def saved(folder: Path, dtype: torch.dtype, offset: int, *, model: str = "dense") -> Any:
    """Write a checkpoint; return the model as transformers loads it."""
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(CONFIGS[model], dtype=dtype).save_pretrained(folder)
    shifted(folder / "model.safetensors", offset)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("model", "dtype", "offset"),
    in_ci(
        ("dense", torch.bfloat16, 40),
        ("stacked experts", torch.bfloat16, 24),
        ("stacks that begin unlike", torch.float32, 8),
        of=[
            *product(("dense", "stacked experts"), (torch.float32, torch.bfloat16, torch.float16), range(0, 64, 8)),
            *product(("stacks that begin unlike",), (torch.float32,), range(0, 64, 8)),  # rows of others are refused
        ],
    ),
)
def test_logits_are_the_plain_models_wherever_the_data_of_a_file_begin(
    model: str, dtype: torch.dtype, offset: int, tmp_path: Path
) -> None:
    plain = saved(tmp_path / "checkpoint", dtype, offset, model=model)
    given = [torch.tensor([[5]]), torch.tensor([[5, 6, 7, 8]]), torch.randint(0, 1000, (3, 7))]
    with torch.no_grad():
        wanted = [plain(ids).logits for ids in given]
    for place, options in PLACES.items():
        with offstage.load(tmp_path / "checkpoint", cache=tmp_path / "cache", max_length=64, **options) as loaded:
            with torch.no_grad():
                answers = [loaded.model(ids).logits for ids in given]
            assert all(map(torch.equal, answers, wanted)), place


@pytest.mark.parametrize("spilled", [False, True])
def test_resident_weights_lie_as_far_from_a_multiple_of_64_as_in_their_file(spilled: bool, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    saved(folder, torch.float32, 24)
    begins = {name: extent.begin for name, extent in read_header(folder / "model.safetensors")[1].items()}
    assert {begin % TENSOR_ALIGNMENT for begin in begins.values()} != {0}
    options = {"offload_state_dict": True} if spilled else {}
    with offstage.load(folder, cache=tmp_path / "cache", max_length=64, **options) as loaded:
        phases = {name: tensor.data_ptr() % TENSOR_ALIGNMENT for name, tensor in loaded.model.named_parameters()}
    assert phases == {name: begins[name] % TENSOR_ALIGNMENT for name in phases}
    with offstage.init_empty_weights():
        empty = AutoModelForCausalLM.from_config(CONFIGS["dense"])
    model = offstage.load_checkpoint_and_dispatch(empty, folder, device_map={"": "cpu"})
    assert phases == {name: tensor.data_ptr() % TENSOR_ALIGNMENT for name, tensor in model.named_parameters()}
