"""Files of torch before 1.6: every tensor was stored, or the file is refused; memory is never taken for weights."""

from pathlib import Path

import pytest
import torch

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.checkpoint import open_checkpoint
from offstage.stages.checkpoints.readers import open_reader


def saved(path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    base = torch.arange(600.0)
    state = {
        "a": base,
        "twin": base,
        "part": base[5:9],
        "b": torch.ones(3).half(),
        "none": torch.empty(0),
        "c": base * 2,
    }
    torch.save(state, path, _use_new_zipfile_serialization=False)
    return path, state


def test_shared_and_empty_storages_are_read(tmp_path: Path) -> None:
    path, state = saved(tmp_path / "m.bin")
    reader = open_reader(open_checkpoint(path))
    assert all(torch.equal(reader.borrow(name), tensor) for name, tensor in state.items())


def test_a_storage_that_the_list_of_keys_leaves_out_is_refused(tmp_path: Path) -> None:
    path, state = saved(tmp_path / "m.bin")
    content = path.read_bytes()
    key = str(state["c"].untyped_storage()._cdata).encode()
    assert content.count(key) == 2, "where the tensor is, and in the list"
    path.write_bytes(content.replace(key, key[:-1] + b"x", 1))
    with pytest.raises(CheckpointError, match=r"m\.bin"):
        open_reader(open_checkpoint(path))


@pytest.mark.parametrize("after", [b"", b"\0" * 5000])
def test_a_storage_of_one_of_two_twins_that_it_leaves_out_is_refused(tmp_path: Path, after: bytes) -> None:
    path, state = saved(tmp_path / "m.bin")
    content = path.read_bytes() + after
    twin = str(state["a"].untyped_storage()._cdata).encode()
    path.write_bytes(content.replace(twin, twin[:-1] + b"x", 1))
    with pytest.raises(CheckpointError, match=r"m\.bin"):
        open_reader(open_checkpoint(path))
