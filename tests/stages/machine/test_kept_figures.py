"""Figures of the machine are measured once; a file of them that is damaged is set aside, and never fails a run."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from offstage.pipeline.cache import user_cache
from offstage.pipeline.cache.sealed_files import read_sealed, write_sealed
from offstage.pipeline.environment import allowed_cores
from offstage.stages.machine.kept_figures import AGAIN_SECONDS, _is_idle, kept_figure, kept_speeds
from tests.deadline import deadline

MEASURED = {"host": 10**10}


def figure(path: Path, measured: int | None = 10**10, *, name: str = "host", of_user: bool = False) -> Any:
    return kept_figure(path.parent, path.name, name, lambda: measured, of_user=of_user)


def never(path: Path) -> Any:
    """Return what is kept: nothing may be measured."""

    def probe() -> int:
        raise KeyError("measured")

    return kept_figure(path.parent, path.name, "host", probe)


def test_what_was_measured_is_read_ever_after_and_added_to(tmp_path: Path) -> None:
    path = tmp_path / "hardware" / "rates.json"
    assert figure(path) == figure(path, 1) == never(path) == 10**10
    assert figure(path, 10**9, name="host_to_device") == 10**9
    assert read_sealed(path) == {**MEASURED, "host_to_device": 10**9}


def test_what_cannot_be_measured_is_nominal_and_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    assert kept_figure(tmp_path, path.name, "host", lambda: None, nominal=5) == 5
    assert not path.exists()
    assert figure(path) == 10**10


def test_what_one_cache_lacks_another_of_the_user_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    own = user_cache() / "hardware" / "rates.json"
    for number, path in enumerate((tmp_path / "a" / "rates.json", tmp_path / "b" / "rates.json", own)):
        assert figure(path, 10**10 + number, of_user=True) == 10**10
        assert read_sealed(path) == MEASURED


def test_a_user_without_a_home_has_each_cache_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    assert figure(tmp_path / "rates.json", of_user=True) == 10**10


BURNING = "while True: pass"


def speeds(path: Path, measured: int, *, seconds: float = 0.0, of_user: bool = False) -> list[Any]:
    """Return the speed that is found, whether it was measured, and whether others disturbed it."""
    asked = []

    def probe(names: Collection[str]) -> dict[str, int]:
        asked.extend(names)
        time.sleep(seconds)
        return {"host": measured, "of no name that was asked": 1}

    found, disturbed = kept_speeds(path.parent, path.name, {"host": "the host"}, probe, of_user=of_user)
    return [found.get("host"), bool(asked), disturbed]


def grow_old(path: Path) -> None:
    """Have what is kept of a time when others computed be of an hour ago."""
    kept = read_sealed(path)
    write_sealed(path, {key: {**one, "at": one["at"] - AGAIN_SECONDS} for key, one in kept.items()})


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Return what says whether others compute from now on."""

    def be(idle: bool) -> None:
        _is_idle.cache_clear()
        part = ("SHARED_PART", 9.0), ("_SEEN_SECONDS", 9.0)  # one step of the account is a hundredth of a second
        for name, value in part if idle else [(name, -1.0) for name, _ in part]:
            monkeypatch.setattr(f"offstage.stages.machine.processor.{name}", value)

    return be


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="only Linux says who computes")
def test_a_speed_that_was_measured_while_others_computed_is_kept_apart(tmp_path: Path) -> None:
    burning = [subprocess.Popen([sys.executable, "-c", BURNING]) for _ in allowed_cores()]
    try:
        assert speeds(tmp_path / "rates.json", 1, seconds=1.0) == [1, True, True]
    finally:
        for each in burning:
            each.kill()
            each.wait()
    ((key, kept),) = read_sealed(tmp_path / "rates.json").items()
    assert (key, kept["figure"]) == ("the host while others computed", 1)
    assert abs(kept["at"] - time.time()) < 60


def test_it_stands_for_an_hour_and_until_nobody_else_computes(tmp_path: Path, idle: Callable[[bool], None]) -> None:
    path = tmp_path / "rates.json"
    idle(False)
    assert [speeds(path, 1), speeds(path, 2)] == [[1, True, True], [1, False, True]]
    idle(True)
    assert speeds(path, 2) == [1, False, True], "jobs that run one after the other have the same"
    grow_old(path)
    idle(False)
    assert speeds(path, 2) == [1, False, True]
    idle(True)
    assert [speeds(path, 2), speeds(path, 3)] == [[2, True, False], [2, False, False]]
    assert read_sealed(path) == {"the host": 2}


def test_a_cache_takes_over_what_was_measured_for_the_user_since(
    tmp_path: Path, idle: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    one, another, own = tmp_path / "a" / "s.json", tmp_path / "b" / "s.json", user_cache() / "hardware" / "s.json"
    idle(False)
    assert [speeds(path, 1, of_user=True) for path in (one, another)] == [[1, True, True], [1, False, True]]
    for path in (one, another, own):
        grow_old(path)
    idle(True)
    assert speeds(one, 2, of_user=True) == [2, True, False]
    idle(False)
    assert speeds(another, 3, of_user=True) == [2, False, False], "no matter who computes"
    assert read_sealed(one) == read_sealed(another) == read_sealed(own) == {"the host": 2}


def test_what_is_no_speed_is_kept_whoever_computes(tmp_path: Path, idle: Callable[[bool], None]) -> None:
    idle(False)
    assert figure(tmp_path / "rates.json") == 10**10
    assert read_sealed(tmp_path / "rates.json") == MEASURED


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
    figure(path, 2 * 10**10)
    damage(path)
    with deadline():
        assert figure(path) == never(path) == 10**10
    assert list(tmp_path.glob(".damaged-*"))


@pytest.mark.parametrize("obstacle", ["a file", "a FIFO", "locks that are folders"])
def test_where_nothing_can_be_kept_or_locked_each_run_measures(obstacle: str, tmp_path: Path) -> None:
    path = tmp_path / "hardware" / "rates.json"
    if obstacle == "a file":
        path.parent.touch()
    elif obstacle == "a FIFO":
        os.mkfifo(path.parent)
    else:
        path.parent.joinpath(".rates.json.lock").mkdir(parents=True)
    assert figure(path) == 10**10
    assert figure(path, 2 * 10**10) == (10**10 if path.exists() else 2 * 10**10)


UNPRIVILEGED = """
import os, sys
from pathlib import Path
from offstage.stages.machine.kept_figures import kept_figure
if os.geteuid() == 0:
    os.setgid(65534), os.setuid(65534)
path = Path(sys.argv[1])
print(kept_figure(path.parent, path.name, sys.argv[2], lambda: 10**9))
"""


@pytest.mark.parametrize(("name", "expected"), [("host", 10**10), ("host_to_device", 10**9)])
@pytest.mark.parametrize("rights", [0o555, 0o000])
def test_a_cache_of_somebody_else_is_read_and_not_written(name: str, expected: int, rights: int) -> None:
    folder = Path("/tmp") / f"offstage-{os.getpid()}-{name}-{rights}"
    folder.mkdir()
    path = folder / "rates.json"
    try:
        figure(path)
        folder.chmod(rights)
        command = [sys.executable, "-c", UNPRIVILEGED, str(path), name]
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3], check=False)
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == (expected if rights else 10**9)
