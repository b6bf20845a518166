"""An offload folder that somebody else wrote: its index is held to what an index can say."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from offstage.pipeline.errors import CheckpointError
from offstage.stages.shard_load.offload_folder import OffloadedWeightsLoader, offload_state_dict

GOOD = {"dtype": "float32", "shape": [2, 3]}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"shape": [2, 3]}, "unknown dtype None"),
        ({**GOOD, "dtype": "fp8"}, "unknown dtype 'fp8'"),
        ({**GOOD, "dtype": ["float32"]}, r"unknown dtype \['float32'\]"),
        ({"dtype": "float32"}, "None in its index is no shape"),
        ({**GOOD, "shape": "23"}, "'23' in its index is no shape"),
        ({**GOOD, "shape": 6}, "6 in its index is no shape"),
        ({**GOOD, "shape": [-2, -3]}, "is no shape"),
        ({**GOOD, "shape": [2.0, 3]}, "is no shape"),
        ({**GOOD, "shape": [2**62, 2**62]}, "is no shape"),
        ({**GOOD, "shape": [2, 4]}, "24 bytes instead of the 32"),
        ({**GOOD, "file": "\ud800.dat"}, "no name that a file can have"),
        ({**GOOD, "file": "a\0.dat"}, "no name that a file can have"),
        ({"safetensors_file": 5, "dtype": "float32"}, "no such file"),
    ],
)
def test_an_entry_that_says_what_none_can_is_refused(entry: dict[str, Any], words: str, tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"w": torch.ones(2, 3)})
    tmp_path.joinpath("index.json").write_text(json.dumps({"w": entry}))
    with pytest.raises(CheckpointError, match=words):
        OffloadedWeightsLoader(save_folder=tmp_path)["w"]


@pytest.mark.parametrize("entry", [None, 5, [], "float32"])
def test_an_entry_that_is_no_mapping_is_not_there(entry: object, tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"w": torch.ones(2, 3), "v": torch.ones(1)})
    index = json.loads(tmp_path.joinpath("index.json").read_text())
    tmp_path.joinpath("index.json").write_text(json.dumps({**index, "w": entry}))
    assert list(OffloadedWeightsLoader(save_folder=tmp_path)) == ["v"]


PIECES = {"dtype": "float32", "shape": [2, 2, 3], "weight_names": ["a", "b"]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"safetensors_files": []}, "lists no files"),
        ({"weight_names": "ab"}, "lists no files or no tensors"),
        ({"weight_names": ["a", "c"]}, "holds no tensor 'c'"),
        ({"shape": [3, 2, 3]}, r"2 of its tensors don't make up one of \[3, 2, 3\]"),
        ({"shape": []}, "don't make up"),
        ({"shape": "2"}, "don't make up"),
        ({"dtype": "fp8"}, "unknown dtype"),
    ],
)
def test_an_entry_of_several_tensors_is_held_to_them(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    pieces = {name: torch.randn(2, 3) for name in "ab"}
    save_file(pieces, tmp_path / "experts.safetensors")
    entry = {**PIECES, "safetensors_files": [str(tmp_path / "experts.safetensors")]}
    assert torch.equal(OffloadedWeightsLoader(index={"w": entry})["w"], torch.stack(list(pieces.values())))
    with pytest.raises(CheckpointError, match=words):
        OffloadedWeightsLoader(index={"w": {**entry, **change}})["w"]
