"""Figures of the machine are measured once; a file of them that is damaged is set aside, and never fails a run."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offstage.pipeline.cache.sealed_files import read_sealed, write_sealed
from offstage.pipeline.cache.user_cache import user_cache
from offstage.stages.machine.kept_figures import kept_for_user, kept_or_measured
from offstage.stages.machine.kernels import are_factors
from offstage.stages.machine.rates import is_rate
from tests.deadline import deadline

MEASURED = {"host": 10**10}


def figures(path: Path, measured: int = 10**10) -> dict[str, Any]:
    return kept_or_measured(path, {"host": lambda: measured}, is_sound=is_rate)


def never(path: Path) -> dict[str, Any]:
    """Return what is kept: nothing may be measured."""

    def probe() -> int:
        raise KeyError("measured")

    return kept_or_measured(path, {"host": probe}, is_sound=is_rate)


def test_what_was_measured_is_read_ever_after_and_added_to(tmp_path: Path) -> None:
    path = tmp_path / "hardware" / "rates.json"
    assert figures(path) == never(path) == MEASURED
    both = kept_or_measured(path, {"host": lambda: 1, "link": lambda: 10**9}, is_sound=is_rate)
    assert both == read_sealed(path) == {**MEASURED, "link": 10**9}


def test_what_one_cache_lacks_another_of_the_user_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    asked: list[int] = []

    def probe() -> int:
        asked.append(1)
        return 10**10

    own = user_cache() / "hardware" / "rates.json"
    for path in (tmp_path / "a" / "rates.json", tmp_path / "b" / "rates.json", own):
        assert kept_for_user(path, {"host": probe}, is_sound=is_rate) == read_sealed(path) == MEASURED
    assert len(asked) == 1


def test_a_user_without_a_home_has_each_cache_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    assert kept_for_user(tmp_path / "rates.json", {"host": lambda: 10**10}, is_sound=is_rate) == MEASURED


def flip(path: Path) -> None:
    """Flip the lowest bit of a figure's first digit: the file stays JSON."""
    path.write_text(path.read_text().replace('"host": 2', '"host": 3'))


def by_folder(path: Path) -> None:
    path.unlink()
    path.joinpath("inside").mkdir(parents=True)


def by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def by_socket(path: Path) -> None:
    path.unlink()
    home = Path.cwd()
    os.chdir(path.parent)  # a socket's path is short
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(home)


def by_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def by(text: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(text) and None


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": by(""),
    "cut": lambda path: path.write_text(path.read_text()[:-9]),
    "a bit flipped": flip,
    "no text": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "nested deep": by("[" * 100_000),
    "of an older release": by('{"host": 1}'),
    "null": by("null"),
    "a list": by("[]"),
    "a folder": by_folder,
    "a FIFO": by_fifo,
    "a socket": by_socket,
    "a device": by_device,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_set_aside_and_measured_again(damage: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    figures(path, 2 * 10**10)
    damage(path)
    with deadline():
        assert figures(path) == never(path) == MEASURED
    assert list(tmp_path.glob(".damaged-*"))


@pytest.mark.parametrize(
    "figure", [None, True, "fast", 1.5, -1, 0, 10**30, [], {}, float("nan"), float("inf")], ids=repr
)
def test_a_figure_that_none_can_be_is_neither_taken_nor_kept(figure: object, tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    write_sealed(path, {"host": figure, "link": 10**9})
    assert figures(path) == {**MEASURED, "link": 10**9}
    assert kept_or_measured(path, {"device": lambda: figure}, is_sound=is_rate).keys() == {"host", "link"}


@pytest.mark.parametrize(
    "found", [3, [], {"mm": 1}, {"mm": [1, 2]}, {"mm": [1, 2, -1]}, {"mm": [1, 2, "3"]}, {"mm": [0, 0, 1e9]}], ids=repr
)
def test_factors_that_no_kernel_has_are_not_taken(found: object) -> None:
    assert not are_factors(found)


@pytest.mark.parametrize("obstacle", ["a file", "a FIFO", "locks that are folders"])
def test_where_nothing_can_be_kept_or_locked_each_run_measures(obstacle: str, tmp_path: Path) -> None:
    path = tmp_path / "hardware" / "rates.json"
    if obstacle == "a file":
        path.parent.touch()
    elif obstacle == "a FIFO":
        os.mkfifo(path.parent)
    else:
        path.parent.joinpath(".rates.json.lock").mkdir(parents=True)
    assert figures(path) == MEASURED
    assert figures(path, 2 * 10**10)["host"] == (10**10 if path.exists() else 2 * 10**10)


UNPRIVILEGED = """
import json, os, sys
from pathlib import Path
from offstage.stages.machine.kept_figures import kept_or_measured
from offstage.stages.machine.rates import is_rate
if os.geteuid() == 0:
    os.setgid(65534), os.setuid(65534)
print(json.dumps(kept_or_measured(Path(sys.argv[1]), {sys.argv[2]: lambda: 10**9}, is_sound=is_rate)))
"""


@pytest.mark.parametrize(("name", "expected"), [("host", MEASURED), ("link", {**MEASURED, "link": 10**9})])
@pytest.mark.parametrize("rights", [0o555, 0o000])
def test_a_cache_of_somebody_else_is_read_and_not_written(name: str, expected: dict[str, int], rights: int) -> None:
    folder = Path("/tmp") / f"offstage-{os.getpid()}-{name}-{rights}"
    folder.mkdir()
    path = folder / "rates.json"
    try:
        figures(path)
        folder.chmod(rights)
        command = [sys.executable, "-c", UNPRIVILEGED, str(path), name]
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3], check=False)
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == (expected if rights else {name: 10**9})
