import shutil
from pathlib import Path

import pytest
import torch

from pipeline.errors import CheckpointError, ConfigError
from pipeline.stage import Stage
from stages.shard_load.stage import ShardLoad
from tests.stages.shard_load.making import (
    FakeContext,
    artifact_of,
    assert_same,
    empty_model,
    load,
    make_context,
    make_model,
    save_bin,
    save_safetensors,
    state_of,
)

BFLOAT16 = torch.bfloat16


def context_for(root: Path, folder: Path, **config: object) -> FakeContext:
    return make_context(root, folder, lambda: empty_model("llama", BFLOAT16), lambda name: "disk", **config)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A ``.bin`` checkpoint: all that lies on disk must go through the offload store."""
    return save_bin(make_model("llama", BFLOAT16), tmp_path / "checkpoint")


def test_it_is_a_stage() -> None:
    assert isinstance(ShardLoad(), Stage)


def test_its_summary_says_what_was_read_where(tmp_path: Path, checkpoint: Path) -> None:
    load(context_for(tmp_path, checkpoint), tmp_path / "out")
    artifact = artifact_of("shard_load", tmp_path / "out")
    assert ShardLoad().report(artifact).summary == "1 file, 0 B read in place, 43.33 kB stored"
    entry = artifact.json("offload_index.json")["lm_head.weight"]
    assert entry == {
        "source": "store", "file": "lm_head.weight.dat", "dtype": "bfloat16", "shape": [96, 32], "offsets": [0, 6144],
    }  # fmt: skip


def test_a_second_load_writes_nothing(tmp_path: Path, checkpoint: Path) -> None:
    load(context_for(tmp_path, checkpoint), tmp_path / "out")
    files = {file: file.stat().st_mtime_ns for file in tmp_path.glob("cache/offload/*/*.dat")}
    assert len(files) == 21
    load(context_for(tmp_path / "again", checkpoint), tmp_path / "out2")
    context = context_for(tmp_path, checkpoint)
    load(context, tmp_path / "out2")
    assert files == {file: file.stat().st_mtime_ns for file in files}


def test_what_the_store_lost_is_made_again(tmp_path: Path, checkpoint: Path) -> None:
    context = context_for(tmp_path, checkpoint)
    before = state_of(load(context, tmp_path / "out"))
    shutil.rmtree(tmp_path / "cache" / "offload")
    assert_same(state_of(ShardLoad().revive(context)), before)


def test_a_given_folder_is_used_and_one_of_another_checkpoint_is_not_read(tmp_path: Path, checkpoint: Path) -> None:
    given = tmp_path / "offload"
    load(context_for(tmp_path, checkpoint, offload_folder=str(given)), tmp_path / "out")
    assert (given / "lm_head.weight.dat").stat().st_size == 6144
    other = make_model("llama", BFLOAT16)
    torch.nn.init.ones_(other.lm_head.weight)
    folder = save_bin(other, tmp_path / "other")
    placed = load(context_for(tmp_path / "b", folder, offload_folder=str(given)), tmp_path / "out2")
    assert_same(state_of(placed), other.state_dict())


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"offload_folder": "{file}"}, ConfigError, "is a file"),
        ({"offload_folder": "{checkpoint}"}, ConfigError, "the checkpoint's own folder"),
        ({"offload_folder": 3}, ConfigError, "a folder or null belongs here"),
        ({"offload_state_dict": "yes"}, ConfigError, "offload_state_dict: 'yes': true or false"),
        ({"model": {"path": "{root}/gone"}}, CheckpointError, "gone: no such checkpoint"),
        ({"model": {"path": None}}, CheckpointError, "model.path: None"),
    ],
)
def test_a_config_that_cannot_be_carried_out_is_refused(
    tmp_path: Path, checkpoint: Path, change: dict, error: type[Exception], words: str
) -> None:
    tmp_path.joinpath("file").touch()

    def filled(value: object) -> object:
        if isinstance(value, dict):
            return {key: filled(inner) for key, inner in value.items()}
        places = {"file": tmp_path / "file", "checkpoint": checkpoint, "root": tmp_path}
        return value.format(**places) if isinstance(value, str) else value

    context = context_for(tmp_path, checkpoint)
    context.config.update({key: filled(value) for key, value in change.items()})
    faults = list(ShardLoad().check(context.config))
    assert [fault.error for fault in faults] == [error]
    assert words in str(faults[0])


def test_the_key_changes_with_the_checkpoint_and_the_folder_alone(tmp_path: Path) -> None:
    folder = save_safetensors(make_model("llama", BFLOAT16), tmp_path / "checkpoint")
    context = context_for(tmp_path, folder)
    key = ShardLoad().key(context)
    assert ShardLoad().key(context_for(tmp_path / "b", folder)) == key
    assert ShardLoad().key(context_for(tmp_path / "c", folder, offload_folder="x")) != key
    shutil.copyfile(folder / "config.json", tmp_path / "config.json")
    folder.joinpath("config.json").write_text("{}")
    assert ShardLoad().key(context) != key
