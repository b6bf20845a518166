import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.checkpoint import fingerprint_of, open_checkpoint
from tests.deadline import seconds_of_children

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
MAP = {"a": ONE, "b": TWO}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two shards with an index."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file({"a": torch.ones(2, 2)}, folder / ONE)
    save_file({"b": torch.ones(3)}, folder / TWO)
    folder.joinpath("config.json").write_text("{}")
    write_index(folder, {"metadata": {"total_size": 28}, "weight_map": MAP})
    return folder


def write_index(folder: Path, index: object) -> None:
    text = index if isinstance(index, bytes) else json.dumps(index).encode()
    folder.joinpath("model.safetensors.index.json").write_bytes(text)


def test_a_sharded_folder_is_opened_without_reading_data(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert checkpoint.format == "safetensors"
    assert [file.name for file in checkpoint.files] == [ONE, TWO]
    assert {name: (entry.file.name, entry.shape) for name, entry in checkpoint.entries.items()} == {
        "a": (ONE, (2, 2)),
        "b": (TWO, (3,)),
    }


def test_a_flat_index_an_index_file_and_a_file_on_its_own_work_too(folder: Path) -> None:
    write_index(folder, MAP)
    assert open_checkpoint(folder).entries.keys() == {"a", "b"}
    assert open_checkpoint(folder / "model.safetensors.index.json").entries.keys() == {"a", "b"}
    assert open_checkpoint(folder / TWO).entries.keys() == {"b"}


def test_safetensors_count_where_both_formats_are_there(folder: Path) -> None:
    torch.save({"a": torch.ones(1)}, folder / "pytorch_model.bin")
    assert open_checkpoint(folder).format == "safetensors"


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        ([1], "not a mapping"),
        ({}, "not a mapping"),
        ({"weight_map": {}}, "not a mapping"),
        ({"weight_map": {"a": 1}}, "tensor 'a': the name of a shard"),
        (
            b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
            "duplicate name 'a' (a tensor in two shards?)",
        ),
        ({"weight_map": {**MAP, "c": TWO}}, f"tensor 'c' is said to lie in {TWO}, which doesn't hold it"),
        ({"weight_map": {"a": TWO, "b": TWO}}, "tensor 'a' is said to lie in"),
        ({"weight_map": {"a": ONE, "b": "other.safetensors"}}, "other.safetensors: no such file"),
        ({"weight_map": {**MAP, "b": "../b.safetensors"}}, "'../b.safetensors' is not a plain file name"),
        ({"weight_map": {**MAP, "b": "/etc/passwd"}}, "'/etc/passwd' is not a plain file name"),
        ({"weight_map": {**MAP, "b": ".."}}, "'..' is not a plain file name"),
        ({"weight_map": {**MAP, "b": ""}}, "'' is not a plain file name"),
        ({"weight_map": {**MAP, "": ONE}}, "an empty name"),
        ({"weight_map": {**MAP, "\ud800": ONE}}, "not text"),
        ({"weight_map": {**MAP, "c": "\ud800.safetensors"}}, "not a plain file name"),
    ],
)
def test_a_bad_index_is_refused(folder: Path, index: object, words: str) -> None:
    write_index(folder, index)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_index_that_leaves_out_a_tensor_is_refused(folder: Path) -> None:
    save_file({"b": torch.ones(3), "c": torch.ones(1)}, folder / TWO)
    with pytest.raises(CheckpointError, match=f"leaves out tensor 'c', which {TWO} holds"):
        open_checkpoint(folder)


def test_one_tensor_in_two_shards_is_refused(folder: Path) -> None:
    save_file({"a": torch.ones(2, 2), "b": torch.ones(3)}, folder / TWO)
    with pytest.raises(CheckpointError, match=f"tensor 'a' is in {ONE} too"):
        open_checkpoint(folder)


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with tempfile.TemporaryDirectory() as short, socket.socket(socket.AF_UNIX) as made:
        made.bind(f"{short}/socket")  # the address of a socket has room for a hundred characters
        Path(short, "socket").rename(path)


STRANGE = {
    "a FIFO": (make_fifo, "not a regular file"),
    "a socket": (make_socket, "not a regular file"),
    "a folder": (Path.mkdir, "not a regular file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    "an empty file": (Path.touch, "an empty file"),
    "nothing": (lambda path: None, "no such file"),
    "a dangling link": (lambda path: path.symlink_to(path.with_name("gone")), "no such file"),
    "a link in a circle": (lambda path: path.symlink_to(path), "can't be read"),
}


@pytest.mark.parametrize("case", STRANGE)
def test_only_a_regular_file_is_taken_as_a_shard(folder: Path, case: str) -> None:
    make, words = STRANGE[case]
    (folder / TWO).unlink()
    make(folder / TWO)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert f"{folder / TWO}: {words}" in str(caught.value)


def test_a_link_that_leaves_the_folder_is_followed_only_if_allowed(folder: Path, tmp_path: Path) -> None:
    shutil.move(folder / TWO, tmp_path / "outside.safetensors")
    (folder / TWO).symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(CheckpointError, match=r"leaves the folder; set model.allow_links=true"):
        open_checkpoint(folder)
    assert open_checkpoint(folder, allow_links=True).entries.keys() == {"a", "b"}


def test_the_links_of_a_hub_cache_are_fine(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--who--what"
    snapshot, blobs = cache / "snapshots" / "abc", cache / "blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in folder.iterdir():
        shutil.move(file, blobs / f"hash-{file.name}")
        snapshot.joinpath(file.name).symlink_to(Path("../../blobs") / f"hash-{file.name}")
    assert open_checkpoint(snapshot).entries.keys() == {"a", "b"}


@pytest.mark.parametrize("name", ["weight_map.index.json", "one.safetensors"])
def test_the_only_index_or_file_of_a_folder_may_have_any_name(folder: Path, name: str) -> None:
    if name.endswith(".json"):
        (folder / INDEX).rename(folder / name)
    else:
        (folder / INDEX).unlink()
        (folder / TWO).unlink()
        (folder / ONE).rename(folder / name)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.format == "safetensors"
    assert checkpoint.entries.keys() == ({"a", "b"} if name.endswith(".json") else {"a"})


@pytest.mark.parametrize(
    ("name", "words"), [("gone", "no such checkpoint"), ("empty", "no weights here"), ("x.txt", "known suffixes")]
)
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, name: str, words: str) -> None:
    tmp_path.joinpath("empty").mkdir()
    tmp_path.joinpath("x.txt").write_text("x")
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(tmp_path / name)


def touch_config(folder: Path) -> None:
    folder.joinpath("config.json").write_text('{"a": 1}')


def touch_index(folder: Path) -> None:
    write_index(folder, MAP)


def change_weight(folder: Path) -> None:
    before = (folder / ONE).stat()
    save_file({"a": torch.ones(2, 2) * 1.5}, folder / ONE)
    os.utime(folder / ONE, ns=(before.st_atime_ns, before.st_mtime_ns))


def touch_header(folder: Path) -> None:
    before = (folder / ONE).stat()
    save_file({"a": torch.ones(4, 1)}, folder / ONE)
    os.utime(folder / ONE, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("change", [touch_config, touch_index, change_weight, touch_header])
def test_the_fingerprint_changes_with_the_checkpoint(folder: Path, change: object) -> None:
    before = fingerprint_of(folder)
    assert fingerprint_of(folder) == before
    change(folder)
    assert fingerprint_of(folder) != before


def test_times_and_places_are_no_part_of_the_fingerprint(folder: Path, tmp_path: Path) -> None:
    before = fingerprint_of(folder)
    os.utime(folder / ONE, ns=(1, 1))
    assert fingerprint_of(folder) == before
    assert fingerprint_of(Path(shutil.copytree(folder, tmp_path / "copy"))) == before


@pytest.mark.parametrize("old", [False, True])
def test_the_fingerprint_of_a_bin_changes_with_its_values(tmp_path: Path, old: bool) -> None:
    path = tmp_path / "x.bin"
    torch.save({"a": torch.ones(8)}, path, _use_new_zipfile_serialization=not old)
    before = path.stat()
    first = fingerprint_of(path)
    torch.save({"a": torch.zeros(8)}, path, _use_new_zipfile_serialization=not old)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert fingerprint_of(path) != first


def test_the_fingerprint_needs_no_torch_and_little_time(folder: Path) -> None:
    code = (
        "import sys, pathlib, offstage.stages.shard_load.stage;"
        "from offstage.stages.checkpoints.checkpoint import fingerprint_of;"
        f"fingerprint_of(pathlib.Path({str(folder)!r}));"
        "assert not {'torch', 'transformers', 'numpy'} & {*sys.modules}"
    )
    began = seconds_of_children()
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
    assert seconds_of_children() - began < 3
