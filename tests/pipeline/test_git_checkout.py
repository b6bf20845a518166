"""What git's files say of a checkout is what git says, and nothing that a checkout configures is run."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from offstage.pipeline.git_checkout import git_state, is_dirty


def git(folder: Path, *arguments: str) -> str:
    own = ["-c", "user.name=x", "-c", "user.email=x@y", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", folder, *own, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "own"
    (folder / "below").mkdir(parents=True)
    git(folder.parent, "init", "--quiet", str(folder))
    folder.joinpath("a.txt").write_text("one\n")
    folder.joinpath("below/b.txt").write_text("two\n")
    folder.joinpath("link").symlink_to("a.txt")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message=first")
    return folder


def changed(folder: Path) -> None:
    folder.joinpath("a.txt").write_text("six\n")


def longer(folder: Path) -> None:
    folder.joinpath("below/b.txt").write_text("two and more\n")


def removed(folder: Path) -> None:
    folder.joinpath("a.txt").unlink()


def staged(folder: Path) -> None:
    folder.joinpath("a.txt").write_text("six\n")
    git(folder, "add", "a.txt")


def added(folder: Path) -> None:
    folder.joinpath("c.txt").write_text("three\n")
    git(folder, "add", "c.txt")


def relinked(folder: Path) -> None:
    folder.joinpath("link").unlink()
    folder.joinpath("link").symlink_to("below")


def unchanged(folder: Path) -> None:
    """Leave all as it is."""


def touched(folder: Path) -> None:
    folder.joinpath("a.txt").touch()


def unknown(folder: Path) -> None:
    folder.joinpath("new.txt").write_text("git doesn't know it\n")


def committed(folder: Path) -> None:
    staged(folder)
    git(folder, "commit", "--quiet", "--message=second")


CHANGES = (changed, longer, removed, staged, added, relinked, unchanged, touched, unknown, committed)


@pytest.mark.parametrize("change", CHANGES)
def test_it_is_dirty_where_git_says_so(checkout: Path, change: Callable[[Path], None]) -> None:
    change(checkout)
    dirty = is_dirty(checkout)  # before git looks, which refreshes what it knows of times
    assert dirty == bool(git(checkout, "status", "--porcelain", "--untracked-files=no"))
    state = {"commit": git(checkout, "rev-parse", "HEAD"), "dirty": dirty}
    assert git_state(checkout / "below") == state == git_state(checkout)


def test_a_worktree_is_its_own(checkout: Path) -> None:
    other = checkout.parent / "other"
    git(checkout, "worktree", "add", "--quiet", "-b", "other", str(other))
    changed(other)
    assert (is_dirty(checkout), is_dirty(other)) == (False, True)


def test_nothing_that_a_checkout_configures_is_run(checkout: Path) -> None:
    canary = checkout.parent / "canary"
    script = checkout / ".git" / "evil"
    script.write_text(f"#!/bin/sh\ntouch {canary}\ncat\n")
    script.chmod(0o755)
    checkout.joinpath(".gitattributes").write_text("* filter=evil\n")
    config = f'[filter "evil"]\n\tclean = {script}\n[core]\n\tfsmonitor = {script}\n'
    own = checkout / ".git/config"
    own.write_text(own.read_text() + config)
    changed(checkout)
    assert is_dirty(checkout)
    assert not canary.exists()


@pytest.mark.parametrize("damage", [b"", b"DIRC", b"DIRC\0\0\0\2\xff\xff\xff\xff", b"DIRC\0\0\0\4\0\0\0\1", b"x" * 99])
def test_an_index_that_says_nothing_tells_nothing(checkout: Path, damage: bytes) -> None:
    checkout.joinpath(".git/index").write_bytes(damage)
    assert is_dirty(checkout) is None


def test_no_checkout_is_none() -> None:
    assert git_state(Path("/proc")) is None
