import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.checkpoint import open_checkpoint
from offstage.stages.checkpoints.readers import open_reader

MARK = "code_has_run"


class Harmful:
    """Unpickled as code would be: it makes a file."""

    def __init__(self, folder: Path) -> None:
        self.command = f"touch {folder / MARK}"

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


def torch_saved(value: object) -> object:
    return lambda path: torch.save(value, path)


def truncated(path: Path) -> None:
    torch.save({"a": torch.ones(1000)}, path)
    path.write_bytes(path.read_bytes()[:3000])


def old_truncated(path: Path) -> None:
    torch.save({"a": torch.ones(1000)}, path, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes()[:3000])


REFUSED = {
    "an object that needs code": (lambda path: torch.save({"a": Harmful(path.parent)}, path), "needs code to run"),
    "an old pickle that needs code": (
        lambda path: torch.save({"a": Harmful(path.parent)}, path, _use_new_zipfile_serialization=False),
        "needs code to run",
    ),
    "a plain pickle that needs code": (
        lambda path: path.write_bytes(pickle.dumps(Harmful(path.parent))), "m.bin",
    ),
    "a whole module": (torch_saved(torch.nn.Linear(2, 2)), "needs code to run"),
    "a truncated zip": (truncated, "can't be loaded"),
    "a truncated old pickle": (old_truncated, "m.bin"),
    "no pickle at all": (lambda path: path.write_bytes(b"hello world" * 100), "m.bin"),
    "a safetensors file": (lambda path: save_file({"a": torch.ones(1)}, path), "m.bin"),
    "a tensor on its own": (torch_saved(torch.ones(1)), "holds Tensor, not tensors by name"),
    "nothing": (torch_saved({}), "not tensors by name"),
    "a list in a tensor's place": (torch_saved({"a": [1, 2]}), "'a' is list, not a plain tensor"),
    "a nested dict": (torch_saved({"model": {"a": torch.ones(1)}}), "'model' is dict"),
    "a sparse tensor": (torch_saved({"a": torch.eye(2).to_sparse()}), "'a' is Tensor, not a plain tensor"),
    "a name that is no text": (torch_saved({3: torch.ones(1)}), "'3' is not a tensor's name"),
    "a name with a path": (torch_saved({"../a": torch.ones(1)}), "a path in it"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_bin_is_refused_by_name_and_runs_nothing(tmp_path: Path, case: str) -> None:
    make, words = REFUSED[case]
    path = tmp_path / "m.bin"
    make(path)
    with pytest.raises(CheckpointError) as caught:
        open_reader(open_checkpoint(path))
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / MARK).exists()


def test_views_and_shared_storage_of_a_bin_come_out_whole(tmp_path: Path) -> None:
    base = torch.arange(12.0)
    state = {"view": base.view(3, 4).t(), "slice": base[3:7], "scalar": base[5], "twin": base}
    torch.save(state, tmp_path / "m.bin")
    reader = open_reader(open_checkpoint(tmp_path / "m.bin"))
    for name, tensor in state.items():
        read = reader.read(name, torch.float32)
        assert torch.equal(read, tensor)
        assert read.is_contiguous()
        assert read.untyped_storage().nbytes() == tensor.numel() * 4


def test_a_bin_index_that_does_not_match_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "pytorch_model-1.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"b": "pytorch_model-1.bin"}}')
    with pytest.raises(CheckpointError, match=r"tensor 'b' is said to lie in pytorch_model-1\.bin, which doesn't"):
        open_reader(open_checkpoint(tmp_path))
