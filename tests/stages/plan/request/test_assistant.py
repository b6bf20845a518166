"""What an assistant takes: its weights as they are used, whatever they rest in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from offstage.stages.plan.request.requests import assistant_bytes, assistant_weights


@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 2), ("float32", 4)])
def test_quantised_weights_are_counted_as_they_are_used(tmp_path: Path, dtype: str, width: int) -> None:
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}, "dtype": dtype}
    tmp_path.joinpath("config.json").write_text(json.dumps(config))
    codes = torch.zeros(64, 32).to(torch.float8_e4m3fn)
    save_file({"a.weight": codes, "a.weight_scale_inv": torch.ones(4, 2)}, tmp_path / "model.safetensors")
    assert assistant_weights(tmp_path) == 64 * 32 * width
    assert sum(assistant_bytes(str(tmp_path), prompt=1, length=1)) >= 64 * 32 * width


def test_plain_weights_are_counted_as_their_files(tmp_path: Path) -> None:
    tmp_path.joinpath("config.json").write_text("{}")
    save_file({"a.weight": torch.zeros(64, 32)}, tmp_path / "model.safetensors")
    assert assistant_weights(tmp_path) == (tmp_path / "model.safetensors").stat().st_size
