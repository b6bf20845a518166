"""Loads under real limits, which only root may set: a memory cgroup, a full disk, a disk that can't be written."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from offstage.pipeline.errors import StorageError
from tests.__main__ import with_tests
from tests.benchmarks.caps import can_cap, run_capped
from tests.long_form import in_ci
from tests.stages.shard_load.checkpoints import (
    FakeContext,
    assert_same,
    empty_model,
    load,
    make_context,
    make_model,
    save_bin,
    state_of,
)
from tests.stages.shard_load.one_load import SHAPE, TENSORS

MIB = 2**20
REPOSITORY = Path(__file__).parents[3]

needs_cgroups = pytest.mark.skipif(not can_cap(), reason="needs root and memory cgroups")


def save(folder: Path, suffix: str, dtype: torch.dtype) -> Path:
    state = {f"weights.{number}": torch.full(SHAPE, float(number), dtype=dtype) for number in range(TENSORS)}
    path = folder / f"m.{suffix}"
    if suffix == "safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    return path


def load_capped(root: Path, path: Path, on_host: int, limit: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.stages.shard_load.one_load", str(root), str(path), str(on_host)]
    return run_capped(command, limit, cwd=REPOSITORY, env=with_tests())


@pytest.fixture(scope="module")
def base_bytes(tmp_path_factory: pytest.TempPathFactory) -> int:
    """What a process holds that has everything imported and nothing loaded."""
    root = tmp_path_factory.mktemp("base")
    done = load_capped(root, save(root, "safetensors", torch.bfloat16), 0, 64 * 2**30)
    return int(json.loads(done.stdout)["base"])


@pytest.mark.long_form
@needs_cgroups
@pytest.mark.parametrize(
    ("suffix", "dtype", "on_host"),
    in_ci(
        ("safetensors", torch.bfloat16, TENSORS),
        of=[
            ("safetensors", torch.bfloat16, TENSORS),
            ("safetensors", torch.bfloat16, TENSORS // 3),
            ("safetensors", torch.float32, TENSORS // 3),
            ("bin", torch.bfloat16, TENSORS // 3),
        ],
    ),
)
def test_a_load_survives_a_cap_of_the_process_its_host_share_and_128_mib(
    base_bytes: int, tmp_path: Path, suffix: str, dtype: torch.dtype, on_host: int
) -> None:
    path = save(tmp_path, suffix, dtype)
    share = on_host * 2 * SHAPE[0] * SHAPE[1]
    done = load_capped(tmp_path / "capped", path, on_host, base_bytes + share + 128 * MIB)
    assert done.returncode == 0, done.stderr[-500:]
    assert json.loads(done.stdout)["right"] == on_host


@pytest.mark.long_form
@needs_cgroups
def test_the_cap_is_real(base_bytes: int, tmp_path: Path) -> None:
    path = save(tmp_path, "safetensors", torch.bfloat16)
    assert load_capped(tmp_path, path, TENSORS, base_bytes + TENSORS * 16 * MIB).returncode == -9


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """43 kB of weights that must all go through the offload store."""
    return save_bin(make_model("llama", torch.bfloat16), tmp_path / "checkpoint")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 32 KiB, unmounted after the test."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = (
        os.geteuid() == 0 and shutil.which("mount") and mount("-t", "tmpfs", "-o", "size=32k", "none", str(folder))
    )
    if not mounted:
        pytest.skip("needs root, and a kernel that lets it mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def mount(*arguments: str) -> bool:
    return subprocess.run(["mount", *arguments], check=False, capture_output=True).returncode == 0


def context_for(root: Path, checkpoint: Path, folder: Path) -> FakeContext:
    make = lambda: empty_model("llama", torch.bfloat16)  # noqa: E731
    return make_context(root, checkpoint, make, lambda name: "disk", offload_folder=str(folder))


def right(root: Path, checkpoint: Path, folder: Path) -> None:
    """Check that the next load is right."""
    placed = load(context_for(root, checkpoint, folder), root / "out")
    assert_same(state_of(placed), make_model("llama", torch.bfloat16).state_dict())


def test_too_small_a_disk_is_refused_with_nothing_written(tmp_path: Path, checkpoint: Path, disk: Path) -> None:
    with pytest.raises(StorageError, match=rf"{disk}: 21 offloaded tensors need 43.33 kB \(43328 bytes\), and \d"):
        load(context_for(tmp_path, checkpoint, disk), tmp_path / "failed")
    assert not list(disk.glob("*.dat"))
    assert mount("-o", "remount,size=1m", str(disk))
    right(tmp_path, checkpoint, disk)


def test_a_disk_that_fills_up_meanwhile_leaves_whole_tensors_only(
    tmp_path: Path, checkpoint: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plenty = shutil.disk_usage(disk)._replace(free=2**40)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: plenty)
        with pytest.raises(StorageError, match=rf"{disk}: writing '[\w.]+' \([\d.]+ kB\) failed: No space left"):
            load(context_for(tmp_path, checkpoint, disk), tmp_path / "failed")
    assert not list(disk.glob(".tmp-*"))
    state = make_model("llama", torch.bfloat16).state_dict()
    for file in disk.glob("*.dat"):
        assert file.stat().st_size == state[file.name.removesuffix(".dat")].nbytes
    assert mount("-o", "remount,size=1m", str(disk))
    right(tmp_path, checkpoint, disk)


@pytest.mark.parametrize("made_before", [False, True])
def test_a_read_only_disk_is_named_with_the_bytes_that_it_should_take(
    tmp_path: Path, checkpoint: Path, disk: Path, made_before: bool
) -> None:
    assert mount("-o", "remount,size=1m", str(disk))
    if made_before:  # as a store that was emptied, but keeps its mark
        right(tmp_path, checkpoint, disk)
        for file in (*disk.glob("*.dat"), disk / "index.json"):
            file.unlink()
    assert mount("-o", "remount,ro", str(disk))
    words = rf"{disk}: the offload folder can't be used: .*; set offload_folder to a folder .* 43.33 kB \(43328 bytes\)"
    with pytest.raises(StorageError, match=words):
        load(context_for(tmp_path / "b", checkpoint, disk), tmp_path / "failed")
    assert mount("-o", "remount,rw", str(disk))
    right(tmp_path / "c", checkpoint, disk)


def test_a_whole_store_on_a_read_only_disk_is_read(tmp_path: Path, checkpoint: Path, disk: Path) -> None:
    assert mount("-o", "remount,size=1m", str(disk))
    right(tmp_path, checkpoint, disk)
    assert mount("-o", "remount,ro", str(disk))
    right(tmp_path / "again", checkpoint, disk)
