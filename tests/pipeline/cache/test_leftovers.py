"""What killed processes leave is swept by age, and nothing else."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import pytest

from offstage.pipeline.cache.locks import locked
from offstage.pipeline.cache.store import Store
from tests.pipeline.cache.stores import KEY, names, write


def aged(path: Path, *, days: float) -> None:
    moment = time.time() - days * 86400
    for each in (path, *path.rglob("*")):
        os.utime(each, (moment, moment))


@pytest.mark.parametrize("name", [".tmp-1", ".damaged-1", f".{KEY}.lock"])
def test_leftovers_are_swept_once_they_are_a_day_old(root: Path, name: str) -> None:
    path = root / "plan" / name
    path.parent.mkdir(parents=True)
    if name.endswith(".lock"):
        path.touch()
    else:
        (path / "shards").mkdir(parents=True)
        (path / "shards" / "0.bin").write_text("")
    aged(path, days=0.9)
    Store(root).sweep()
    assert path.exists()
    aged(path, days=1.1)
    Store(root).sweep()
    assert not path.exists()


def test_a_folder_in_which_something_is_new_is_not_swept(root: Path) -> None:
    folder = root / "plan" / ".tmp-1"
    folder.mkdir(parents=True)
    (folder / "old").write_text("")
    (folder / "new").write_text("")
    aged(folder, days=2)
    os.utime(folder / "new")
    Store(root).sweep()
    assert folder.exists()


def test_artifacts_and_what_else_lies_there_are_never_swept(root: Path) -> None:
    artifact, _, _ = Store(root).obtain("plan", KEY, write)
    (root / "plan" / ".keep").write_text("")
    aged(root, days=400)
    Store(root).sweep()
    assert artifact.folder.exists()
    assert (root / "plan" / ".keep").exists()


def test_an_old_artifact_that_was_set_aside_today_is_kept_for_a_day(root: Path) -> None:
    artifact, _, _ = Store(root).obtain("plan", KEY, write)
    artifact.path("answer.json").write_bytes(b'{"answer": 43}')
    aged(artifact.folder, days=400)
    assert Store(root).find("plan", KEY) is None
    Store(root).sweep()
    assert [name[:9] for name in names(root / "plan")] == [".damaged-"]


def test_a_lock_that_is_held_is_not_swept(root: Path) -> None:
    path = root / "plan" / f".{KEY}.lock"
    path.parent.mkdir(parents=True)
    with locked(root / "plan" / KEY, work="builds plan"):
        aged(path, days=2)
        Store(root).sweep()
        assert path.exists()
    aged(path, days=2)
    Store(root).sweep()
    assert not path.exists()


def test_a_sweep_of_a_cache_that_is_not_there_does_nothing(root: Path) -> None:
    Store(root).sweep()
    assert not root.exists()


def test_a_cache_that_cannot_be_listed_fails_no_sweep(root: Path) -> None:
    (root / "plan" / ".tmp-1").mkdir(parents=True)
    aged(root / "plan" / ".tmp-1", days=2)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        Store(root).sweep()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert (root / "plan" / ".tmp-1").exists()
