"""The store in one process: building, damage, file systems without locks, the sweep."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from offstage.pipeline.cache import sealed_files, store
from offstage.pipeline.cache.locks import locked
from offstage.pipeline.cache.store import Store
from offstage.pipeline.errors import CheckpointError, StorageError
from tests.pipeline.cache.stores import CONTENT, KEY, assert_right, names, never, write

REPOSITORY = Path(__file__).parents[3]


# Building and finding


def test_what_is_not_there_is_not_found(root: Path) -> None:
    assert Store(root).find("plan", KEY) is None
    assert not root.exists()


def test_an_artifact_is_built_once_and_found_afterwards(root: Path) -> None:
    artifact, made, cached = Store(root).obtain("plan", KEY, write)
    assert (made, cached) == ("live half", False)
    assert artifact.folder == root / "plan" / KEY
    assert artifact.json("answer.json") == {"answer": 42}
    again, made_again, cached_again = Store(root).obtain("plan", KEY, never)
    assert (again, made_again, cached_again) == (artifact, None, True)
    assert Store(root).find("plan", KEY) == artifact
    assert names(root / "plan") == [KEY]


def test_the_manifest_lists_size_and_hash_of_every_file(root: Path) -> None:
    artifact, _, _ = Store(root).obtain("plan", KEY, write)
    data = json.loads((artifact.folder / "manifest.json").read_text())
    assert (data["schema_version"], data["stage"], data["key"]) == (1, "plan", KEY)
    assert {name: entry["size"] for name, entry in data["files"].items()} == {
        name: len(content) for name, content in CONTENT.items()
    }
    assert artifact.digest("answer.json") == data["files"]["answer.json"]["sha256"]


def test_every_file_reaches_the_disk_before_the_manifest_and_the_manifest_before_the_rename(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, replace, rename = os.fsync, os.replace, Path.rename

    def seen_fsync(descriptor: int) -> None:
        steps.append(Path(f"/proc/self/fd/{descriptor}").readlink().name.partition(".json")[0])
        fsync(descriptor)

    def seen_replace(path: Path, target: Path) -> None:
        assert steps.pop() == path.name
        steps.append(target.name)
        replace(path, target)

    def seen_rename(path: Path, target: Path) -> Path:
        steps.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "replace", seen_replace)
    monkeypatch.setattr(Path, "rename", seen_rename)
    Store(root).obtain("plan", KEY, write)
    folder = next(step for step in steps if step.startswith(".tmp-"))
    assert steps == ["answer", "shards", "0.bin", "manifest.json", folder, "rename", "plan"]


@pytest.mark.parametrize("part", ["", "../x", "a/b", ".hidden"])
def test_a_name_that_leads_elsewhere_is_refused(root: Path, part: str) -> None:
    for stage, key in ((part, KEY), ("plan", part)):
        with pytest.raises(ValueError, match="can't name a folder"):
            Store(root).find(stage, key)


# What goes wrong while building


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(3), CheckpointError("x")])
def test_a_build_that_raises_leaves_nothing_and_can_be_tried_again(root: Path, error: BaseException) -> None:
    def fail(folder: Path) -> None:
        write(folder)
        raise error

    with pytest.raises(type(error)) as raised:
        Store(root).obtain("plan", KEY, fail)
    assert raised.value is error
    assert names(root / "plan") == []
    assert Store(root).obtain("plan", KEY, write)[2] is False


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, ["No space left", "free some space", "set outputs"]),
        (errno.EDQUOT, ["quota", "free some space"]),
    ],
)
def test_a_full_disk_is_an_error_that_says_what_to_do(root: Path, number: int, words: list[str]) -> None:
    def fail(folder: Path) -> None:
        raise OSError(number, os.strerror(number))

    with pytest.raises(StorageError) as raised:
        Store(root).obtain("plan", KEY, fail)
    for word in [str(root / "plan"), *words]:
        assert word in str(raised.value)
    assert names(root / "plan") == []


def test_an_error_about_a_file_outside_the_cache_passes_as_it_is(root: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        Store(root).obtain("plan", KEY, lambda folder: (tmp_path / "checkpoint.bin").read_bytes())
    assert not isinstance(raised.value, StorageError)


def test_an_error_about_a_file_inside_the_cache_names_the_folder(root: Path) -> None:
    with pytest.raises(StorageError, match=r"No such file.*set outputs"):
        Store(root).obtain("plan", KEY, lambda folder: (folder / "missing" / "x").write_text(""))


@pytest.mark.parametrize("place", ["outputs", "outputs/cache", "outputs/cache/plan"])
def test_a_file_in_the_place_of_a_folder_is_an_error_that_says_what_to_do(
    root: Path, tmp_path: Path, place: str
) -> None:
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text("")
    with pytest.raises(StorageError, match=r"plan: .*move it away"):
        Store(root).obtain("plan", KEY, never)
    Store(root).sweep()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to_is_an_error_that_says_what_to_do(root: Path) -> None:
    root.mkdir(parents=True)
    root.chmod(0o500)
    with pytest.raises(StorageError, match=r"plan: Permission denied; change its permissions"):
        Store(root).obtain("plan", KEY, never)


def link(folder: Path) -> None:
    (folder / "link").symlink_to("/etc/hostname")


def own_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{}")


@pytest.mark.parametrize(("wrong", "word"), [(link, "link"), (own_manifest, "manifest.json")])
def test_an_artifact_holds_plain_files_only(root: Path, wrong: Callable[[Path], None], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Store(root).obtain("plan", KEY, wrong)
    assert names(root / "plan") == []


# Damage


def edit(**changes: object) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return apply


def flip(folder: Path) -> None:
    path = folder / "shards" / "0.bin"
    path.write_bytes(b"y" + path.read_bytes()[1:])


def cut(name: str) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, 30 if name == "manifest.json" else 4)


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def replace_by_link(folder: Path) -> None:
    (folder / "answer.json").rename(folder.parent / "elsewhere")
    (folder / "answer.json").symlink_to(folder.parent / "elsewhere")


def replace_by_folder(folder: Path) -> None:
    (folder / "answer.json").unlink()
    (folder / "answer.json").mkdir()


def empty(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def replace_by_file(folder: Path) -> None:
    empty(folder)
    folder.rmdir()
    folder.write_text("not a folder")


ENTRY = {"size": 0, "sha256": "0" * 64}
DAMAGES = [
    (flip, "shards/0.bin doesn't match its hash"),
    (cut("shards/0.bin"), "shards/0.bin has 4 bytes instead of 5000"),
    (remove("answer.json"), "answer.json is missing"),
    (replace_by_link, "answer.json isn't a file"),
    (replace_by_folder, "answer.json isn't a file"),
    (cut("manifest.json"), "manifest.json isn't JSON"),
    (lambda folder: os.truncate(folder / "manifest.json", 0), "manifest.json isn't JSON"),
    (lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe"), "manifest.json isn't JSON"),
    (lambda folder: (folder / "manifest.json").write_text("[" * 100_000), "manifest.json isn't JSON"),
    (lambda folder: (folder / "manifest.json").write_text("[1]"), "manifest.json lacks a field"),
    (remove("manifest.json"), "manifest.json is missing"),
    (edit(files=None), "manifest.json lacks a field"),
    (edit(key="f" * 64), "key ffff"),
    (edit(stage="generate"), "stage generate"),
    (edit(schema_version=2), "version 2"),
    (edit(files={"answer.json": {"size": 1}}), "wrong entry for 'answer.json'"),
    (edit(files={"answer.json": {"size": "14", "sha256": ""}}), "wrong entry for 'answer.json'"),
    (edit(files={"../../secret": ENTRY}), "wrong entry for '../../secret'"),
    (edit(files={"/etc/hostname": ENTRY}), "wrong entry for '/etc/hostname'"),
    (empty, "manifest.json is missing"),
    (replace_by_file, "manifest.json is missing"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
def test_a_damaged_artifact_is_set_aside_with_a_warning_and_built_again(
    root: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], words: str
) -> None:
    artifact, _, _ = Store(root).obtain("plan", KEY, write)
    damage(artifact.folder)
    assert Store(root).find("plan", KEY) is None
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.name == "offstage"
    for word in (str(artifact.folder), words, ".damaged-"):
        assert word in warning.getMessage()
    assert any(name.startswith(".damaged-") for name in names(root / "plan"))
    assert Store(root).obtain("plan", KEY, write)[2] is False
    assert_right(root)


def test_of_a_large_file_the_size_is_compared_and_not_the_hash(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact, _, _ = Store(root).obtain("plan", KEY, write)
    flip(artifact.folder)
    monkeypatch.setattr(sealed_files, "REHASH_BYTES", 1000)
    assert Store(root).find("plan", KEY) is not None
    cut("shards/0.bin")(artifact.folder)
    assert Store(root).find("plan", KEY) is None


def test_a_damaged_artifact_that_another_process_is_mending_is_left_to_it(root: Path) -> None:
    artifact, _, _ = Store(root).obtain("plan", KEY, write)
    flip(artifact.folder)
    with locked(root / "plan" / KEY, work="builds plan"):
        assert Store(root).find("plan", KEY) is None
    assert names(root / "plan") == [KEY]


# Without locks


def test_the_slower_of_two_builds_takes_the_artifact_of_the_faster(root: Path, no_locks: None) -> None:
    def overtaken(folder: Path) -> str:
        (folder / "slow").write_text("slow")
        Store(root).obtain("plan", KEY, write)
        return "mine"

    artifact, made, cached = Store(root).obtain("plan", KEY, overtaken)
    assert (made, cached) == ("mine", False)
    assert set(artifact.files) == set(CONTENT)
    assert names(root / "plan") == [KEY]
    assert_right(root)


def test_a_build_that_finds_rubbish_in_its_place_sets_it_aside(root: Path, no_locks: None) -> None:
    def obstructed(folder: Path) -> None:
        write(folder)
        (root / "plan" / KEY).mkdir()
        (root / "plan" / KEY / "rubbish").write_text("")

    assert Store(root).obtain("plan", KEY, obstructed)[2] is False
    assert len(names(root / "plan")) == 2
    assert_right(root)


def test_an_artifact_that_was_mended_since_it_was_judged_is_left_alone(
    root: Path, no_locks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Store(root).obtain("plan", KEY, write)[0].folder
    flip(folder)
    verify, calls = sealed_files.verify, 0

    def mended_meanwhile(*arguments: Path, **options: str) -> object:
        nonlocal calls
        calls += 1
        try:
            return verify(*arguments, **options)
        finally:
            if calls == 2:  # the verdict has been reached, and isn't acted on yet
                monkeypatch.setattr(store, "verify", verify)
                Store(root).obtain("plan", KEY, write)

    monkeypatch.setattr(store, "verify", mended_meanwhile)
    Store(root).find("plan", KEY)
    assert_right(root)
    assert len(names(root / "plan")) == 2


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EIO, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_nothing_to_be_warned_of(
    number: int, root: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    def refuse(_file: int, _operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert Store(root).obtain("plan", KEY, write)[2] is False
    assert_right(root)
    assert [str(warning.message) for warning in recwarn] == []
