"""What was seen of a file is remembered as long as nobody wrote to it, and damage to the memory is healed."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from offstage.pipeline.cache.sealed_files import read_sealed, write_sealed
from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints import hashes, looks
from offstage.stages.checkpoints.checkpoint import fingerprint_of, open_checkpoint
from offstage.stages.checkpoints.hashes import whole_digests
from offstage.stages.checkpoints.samples import sample


@pytest.fixture
def shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of weights that counts as settled, with a user's cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(looks, "SETTLED_SECONDS", 0.0)
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(100_000.0), "b": torch.ones(3)}, path)
    time.sleep(0.02)  # longer than the clock of the file system stands still
    return path


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were looked into so far."""
    names: list[str] = []

    def watched(file: object, tensors: object) -> object:
        names.append(file.name)  # type: ignore[attr-defined]
        return sample(file, tensors)  # type: ignore[arg-type]

    monkeypatch.setattr(looks, "sample", watched)
    return names


def kept(folder: Path) -> Path:
    (path,) = folder.glob("home/offstage/looks/*.json")
    return path


def scale(path: Path, factor: float) -> None:
    """Multiply a weight, in the file's place and with its time as it was."""
    before = path.stat()
    save_file({**load_file(path), "b": torch.ones(3) * factor}, path.with_name("new.safetensors"))
    path.write_bytes(path.with_name("new.safetensors").read_bytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    time.sleep(0.02)


def test_a_file_that_nobody_wrote_to_is_looked_into_once(shard: Path, looked: list[str]) -> None:
    first = fingerprint_of(shard)
    assert fingerprint_of(shard) == first
    assert looked == [shard.name]


def test_a_time_that_changed_is_a_reason_to_look_again_and_nothing_more(shard: Path, looked: list[str]) -> None:
    first = fingerprint_of(shard)
    os.utime(shard)
    time.sleep(0.02)
    assert fingerprint_of(shard) == first
    assert fingerprint_of(Path(shutil.copy2(shard, shard.with_name("copy.safetensors"))))["files"] != first["files"]
    assert looked == [shard.name, shard.name, "copy.safetensors"], "the name is another, and all else the same"


def test_a_weight_that_was_changed_is_found_though_its_time_was_set_back(shard: Path, looked: list[str]) -> None:
    first, time_then = fingerprint_of(shard), shard.stat().st_mtime_ns
    scale(shard, 1.5)
    assert shard.stat().st_mtime_ns == time_then
    assert fingerprint_of(shard) != first
    assert looked == [shard.name] * 2
    scale(shard, 1.0)
    assert fingerprint_of(shard) == first


def spoil(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def lie(path: Path, **fields: object) -> None:
    write_sealed(path, {**read_sealed(path), **fields})


SPOILT: dict[str, Callable[[Path], object]] = {
    "cut short": spoil,
    "edited": lambda path: path.write_text(path.read_text().replace('"sampled": "', '"sampled": "f')),
    "not JSON": lambda path: path.write_text("{"),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a FIFO": lambda path: (path.unlink(), os.mkfifo(path)),
    "of another file": lambda path: lie(path, state=[0, 0, 0, 0, 0], sampled="f" * 64),
    "of another header": lambda path: lie(path, header="f" * 64, sampled="f" * 64),
    "of another release": lambda path: lie(path, how=[0], sampled="f" * 64),
    "of too few tensors": lambda path: lie(path, tensors=[], sampled="f" * 64),
    "of another shape": lambda path: write_sealed(path, ["state"]),
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_memory_that_is_damaged_or_of_something_else_counts_for_nothing_and_is_made_again(
    how: str, shard: Path, looked: list[str]
) -> None:
    first = fingerprint_of(shard)
    SPOILT[how](kept(shard.parent))
    assert fingerprint_of(shard) == first
    assert looked == [shard.name] * 2
    assert fingerprint_of(shard) == first
    if how != "a folder":
        assert looked == [shard.name] * 2, "what was seen then is kept again"


def test_a_file_that_was_just_written_is_not_remembered(
    shard: Path, looked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looks, "SETTLED_SECONDS", 3600.0)
    assert fingerprint_of(shard) == fingerprint_of(shard)
    assert looked == [shard.name] * 2
    assert not list(shard.parent.glob("home/offstage/looks/*"))


@pytest.mark.parametrize("place", ["/dev/null/home", "/proc/home"])
def test_where_nothing_can_be_kept_each_run_looks(
    place: str, shard: Path, looked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", place)
    assert fingerprint_of(shard) == fingerprint_of(shard)
    assert looked == [shard.name] * 2


def test_looks_do_not_pile_up(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "_MOST", 8)
    paths = [shard.with_name(f"{number}.safetensors") for number in range(20)]
    for path in paths:
        shutil.copyfile(shard, path)
        fingerprint_of(path)
    remembered = list(shard.parent.glob("home/offstage/looks/*.json"))
    assert 6 <= len(remembered) <= 8
    assert f"{paths[-1].stat().st_ino:x}" in {path.stem.partition("-")[2] for path in remembered}


def test_a_whole_hash_is_remembered_with_the_look(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    hash_all = hashes._hash_all

    def watched(files: list[object]) -> dict[str, str]:
        hashed.extend(file.name for file in files)  # type: ignore[attr-defined]
        return hash_all(files)  # type: ignore[arg-type]

    monkeypatch.setattr(hashes, "_hash_all", watched)
    first = whole_digests(open_checkpoint(shard))
    assert (
        first
        == whole_digests(open_checkpoint(shard))
        == {shard.name: json.loads(kept(shard.parent).read_text())["content"]["sha256"]}
    )
    assert hashed == [shard.name]
    scale(shard, 2.0)
    assert whole_digests(open_checkpoint(shard)) != first


def test_a_file_of_the_hub_must_have_the_bytes_that_it_is_named_by(shard: Path) -> None:
    cache = shard.parent / "models--who--what"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots" / "abc").mkdir(parents=True)
    (digest,) = whole_digests(open_checkpoint(shard)).values()
    for name in (digest, "0" * 64):
        shutil.copyfile(shard, cache / "blobs" / name)
        link = cache / "snapshots" / "abc" / shard.name
        link.unlink(missing_ok=True)
        link.symlink_to(f"../../blobs/{name}")
        if name == digest:
            assert whole_digests(open_checkpoint(link.parent)) == {shard.name: digest}
        else:
            with pytest.raises(CheckpointError, match="not those that the Hub names the file by"):
                whole_digests(open_checkpoint(link.parent))
