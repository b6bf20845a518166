"""Which files of a folder hold the weights, looked for before anything is opened."""

import json
from pathlib import Path

import pytest

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.weight_files import find_weights, shard_names, weight_files

INDEX = "model.safetensors.index.json"


def write(folder: Path, *names: str) -> Path:
    for name in names:
        folder.joinpath(name).write_text("weights")
    return folder


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        ((INDEX, "model.safetensors", "pytorch_model.bin"), ("model.safetensors", "safetensors")),
        (("pytorch_model.bin", INDEX), (INDEX, "safetensors")),
        (("pytorch_model.bin.index.json", "other.safetensors"), ("pytorch_model.bin.index.json", "bin")),
        (("my.index.json", "a.safetensors", "b.safetensors"), ("my.index.json", None)),
        (("only.safetensors", "config.json"), ("only.safetensors", None)),
    ],
)
def test_known_names_come_before_the_only_file_of_a_kind(
    tmp_path: Path, names: tuple[str, ...], chosen: tuple[str, str | None]
) -> None:
    assert find_weights(write(tmp_path, *names)) == chosen


@pytest.mark.parametrize("names", [(), ("a.safetensors", "b.safetensors"), ("config.json",)])
def test_a_folder_without_weights_names_what_was_looked_for(tmp_path: Path, names: tuple[str, ...]) -> None:
    with pytest.raises(CheckpointError, match=r"no weights here \(looked for model.safetensors, .*index.json\)"):
        find_weights(write(tmp_path, *names))
    assert weight_files(tmp_path) == []


def test_the_files_of_an_index_are_those_that_are_there_and_in_the_folder(tmp_path: Path) -> None:
    write(tmp_path, "1.safetensors", "stranger.safetensors")
    outside = write(tmp_path, "outside").joinpath("outside")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    write(folder, "1.safetensors", "stranger.safetensors")
    shards = {"a": "2.safetensors", "b": "1.safetensors", "c": "../outside", "d": "1.safetensors"}
    folder.joinpath(INDEX).write_text(json.dumps({"weight_map": shards}))
    assert outside.is_file()
    assert shard_names(folder / INDEX) == ["../outside", "1.safetensors", "2.safetensors"]
    assert weight_files(folder) == weight_files(folder / INDEX) == [folder / "1.safetensors"]
    assert weight_files(folder / "stranger.safetensors") == [folder / "stranger.safetensors"]


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": {"a": 1}}', '{"a": "1", "a": "2"}'])
def test_an_index_that_the_loader_refuses_names_no_shards(tmp_path: Path, text: str) -> None:
    tmp_path.joinpath(INDEX).write_text(text)
    assert shard_names(tmp_path / INDEX) == weight_files(tmp_path) == []
