"""What dtype ``auto`` comes to, told from a checkpoint's small files."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stages.empty_init.identity import resolve_dtype


def resolved(folder: Path, dtype: str = "auto") -> str:
    return resolve_dtype({"dtype": dtype, "model": {"kind": "pretrained", "path": str(folder)}})


@pytest.mark.parametrize(
    ("config", "dtype"),
    [({"dtype": "bfloat16"}, "bfloat16"), ({"text_config": {"torch_dtype": "torch.float16"}}, "float16")],
)
def test_what_the_config_declares_counts_first(tmp_path: Path, config: dict[str, object], dtype: str) -> None:
    tmp_path.joinpath("config.json").write_text(json.dumps(config))
    save_file({"a": torch.zeros(2, dtype=torch.float64)}, tmp_path / "model.safetensors")
    assert resolved(tmp_path) == dtype
    assert resolved(tmp_path, "float32") == "float32"


def test_else_the_first_floating_tensor_of_the_checkpoints_own_file_tells(tmp_path: Path) -> None:
    tmp_path.joinpath("config.json").write_text("{}")
    save_file({"a": torch.zeros(2, dtype=torch.float64)}, tmp_path / "a_file_of_something_else.safetensors")
    tensors = {"a": torch.zeros(2, dtype=torch.int64), "b": torch.zeros(2, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert resolved(tmp_path) == "bfloat16"


def test_a_checkpoint_that_tells_nothing_is_float32(tmp_path: Path) -> None:
    tmp_path.joinpath("config.json").write_text("{}")
    assert resolved(tmp_path) == "float32"
    tmp_path.joinpath("model.safetensors").write_bytes(b"damaged")
    assert resolved(tmp_path) == "float32"
