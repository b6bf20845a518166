"""Modules that compute with codes and scales themselves: they get both as the checkpoint has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from offstage.pipeline.errors import CheckpointError
from offstage.stages.shard_load import load_checkpoint_in_model, load_state_dict


class CodedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(32, 32).to(torch.float8_e4m3fn), requires_grad=False)
        self.weight_scale_inv = nn.Parameter(torch.zeros(2, 2), requires_grad=False)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    codes = torch.arange(1024).remainder(120).to(torch.uint8).view(torch.float8_e4m3fn).view(32, 32)
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}}
    tmp_path.joinpath("config.json").write_text(json.dumps(config))
    save_file({"0.weight": codes}, tmp_path / "codes.safetensors")
    save_file({"0.weight_scale_inv": torch.rand(2, 2)}, tmp_path / "scales.safetensors")
    shards = {"0.weight": "codes.safetensors", "0.weight_scale_inv": "scales.safetensors"}
    tmp_path.joinpath("model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    return tmp_path


def test_a_file_alone_is_read_as_it_is(checkpoint: Path) -> None:
    tensors = load_state_dict(checkpoint / "codes.safetensors")
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {"0.weight": torch.float8_e4m3fn}


def test_a_module_of_codes_gets_them_and_its_scales(checkpoint: Path) -> None:
    model = nn.Sequential(CodedLinear())
    load_checkpoint_in_model(model, checkpoint, strict=True)
    for file in ("codes.safetensors", "scales.safetensors"):
        for name, tensor in load_state_dict(checkpoint / file).items():
            kept = model.get_parameter(name)
            assert kept.dtype == tensor.dtype
            assert torch.equal(kept.float(), tensor.float())


def test_a_plain_module_gets_what_both_are_together(checkpoint: Path) -> None:
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    load_checkpoint_in_model(model, checkpoint, strict=True)
    codes = load_state_dict(checkpoint / "codes.safetensors")["0.weight"]
    scales = load_state_dict(checkpoint / "scales.safetensors")["0.weight_scale_inv"]
    spread = scales.repeat_interleave(16, 0).repeat_interleave(16, 1)
    assert torch.equal(model.get_parameter("0.weight"), codes.float() * spread)


def test_codes_in_a_pickle_are_refused_before_they_pass_for_numbers(checkpoint: Path) -> None:
    tensors = {
        name: tensor for file in checkpoint.glob("*.safetensors") for name, tensor in load_state_dict(file).items()
    }
    pickled = checkpoint / "pytorch_model.bin"
    torch.save(tensors, pickled)
    with pytest.raises(CheckpointError, match=r"quantised by 'fp8' are served of safetensors alone"):
        load_checkpoint_in_model(nn.Sequential(nn.Linear(32, 32, bias=False)), pickled)
    assert load_state_dict(pickled).keys() == tensors.keys()
