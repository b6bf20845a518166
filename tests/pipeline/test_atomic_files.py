"""Files that are whole or not there."""

import errno
import os
from pathlib import Path

import pytest

from offstage.pipeline import atomic_files
from offstage.pipeline.atomic_files import create_file, mendable, replace_file, write_text, write_whole
from offstage.pipeline.errors import StorageError


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    replace_file(tmp_path / "a.json", "old")
    write_whole(tmp_path / "a.json", memoryview(b"new, in bytes"))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a.json": b"new, in bytes"}


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_file(tmp_path / "a.json", "old")

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_whole(tmp_path / "a.json", b"new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a.json": "old"}


def test_a_file_is_created_once(tmp_path: Path) -> None:
    create_file(tmp_path / "a.json", "first")
    with pytest.raises(FileExistsError):
        create_file(tmp_path / "a.json", "second")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a.json": "first"}


def test_a_name_as_long_as_the_file_system_takes_can_be_written(tmp_path: Path) -> None:
    write_whole(tmp_path / ("a" * 255), b"data")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EDQUOT, "free some space"),
        (errno.EROFS, "change its permissions"),
        (errno.ENOTDIR, "a file lies where a folder must be"),
        (errno.EMFILE, "ulimit -n"),
        (errno.ENOMEM, "lower max_memory.cpu"),
        (errno.EIO, "check the disk"),
    ],
)
def test_each_refusal_says_what_to_do(number: int, words: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=f"{tmp_path}: {os.strerror(number)}; .*{words}"), mendable(tmp_path):
        raise OSError(number, os.strerror(number))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device here that is always full")
def test_a_write_that_fails_names_its_file() -> None:
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        write_text(Path("/dev/full"), "text")


def test_a_file_whose_name_may_not_last_is_not_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_folder: Path) -> None:
        raise OSError(errno.EIO, "bad")

    monkeypatch.setattr(atomic_files, "sync_folder", fail)
    with pytest.raises(OSError, match="bad"):
        create_file(tmp_path / "run.json", "text")
    assert list(tmp_path.iterdir()) == []


def test_a_leftover_that_cannot_be_removed_fails_no_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    create_file(tmp_path / "run.json", "text")
    replace_file(tmp_path / "run.json", "more")
    assert (tmp_path / "run.json").read_text() == "more"
