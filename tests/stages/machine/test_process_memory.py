from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict
from importlib.util import spec_from_file_location
from pathlib import Path

import psutil
import pytest

from offstage.pipeline.cache import user_cache
from offstage.pipeline.cache.sealed_files import read_sealed, write_sealed
from offstage.pipeline.rendezvous import CONNECT_VARIABLE
from offstage.pipeline.stage import MEASURED
from offstage.stages.machine import own_process, process_memory as module
from offstage.stages.machine.host_memory import PROCESS_BYTES
from offstage.stages.machine.process_memory import (
    FILE_NAME,
    NOMINAL,
    ProcessMemory,
    begin_process_memory,
    identity,
    nominal,
    process_memory,
)
from offstage.stages.machine.rates import DECODING_NAME
from tests.deadline import deadline

OTHER = ProcessMemory(404_000_000, 8_000_000, 12_000_000)
KEPT = asdict(OTHER)


@pytest.fixture(autouse=True)
def _of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))


def refuse_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every process that would be measured fail at once."""
    monkeypatch.setattr("sys.executable", "/bin/false")


def keep(folder: Path, figure: object) -> None:
    folder.mkdir(parents=True)
    write_sealed(folder / FILE_NAME, {identity(): figure})


def test_what_a_cache_keeps_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_to_run(monkeypatch)
    keep(tmp_path / MEASURED, KEPT)
    assert process_memory(tmp_path / MEASURED) == OTHER


def test_what_a_users_other_cache_keeps_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_to_run(monkeypatch)
    keep(user_cache() / MEASURED, KEPT)
    assert process_memory(tmp_path / MEASURED) == OTHER
    assert read_sealed(tmp_path / MEASURED / FILE_NAME) == {identity(): KEPT}


def test_where_it_cannot_be_measured_it_is_nominal_and_the_next_run_asks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        refuse_to_run(patch)
        assert process_memory(user_cache() / MEASURED) == process_memory(tmp_path / MEASURED) == nominal()
    assert not list(tmp_path.rglob(FILE_NAME))
    monkeypatch.setattr(own_process, "PROCESS_BYTES", 1 << 60)
    assert process_memory(tmp_path / MEASURED) == nominal(), "there is no memory for a second process"


def test_a_process_is_measured_and_what_it_holds_is_kept_for_the_user_too(tmp_path: Path) -> None:
    memory = process_memory(tmp_path / MEASURED)
    assert 5 * 10**7 < memory.host < 10**11
    assert memory.device == memory.context == 0
    for folder in (tmp_path / MEASURED, user_cache() / MEASURED):
        assert read_sealed(folder / FILE_NAME) == {identity(): asdict(memory)}
        assert not (folder / DECODING_NAME).exists(), "no rate was asked for"


@pytest.mark.long_form
def test_what_one_of_several_hosts_measures_is_none_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(CONNECT_VARIABLE, "1")
    process_memory(tmp_path / MEASURED)
    assert identity() in (read_sealed(tmp_path / MEASURED / FILE_NAME) or {}), "it was measured"


def test_what_was_begun_is_waited_for_and_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python, asked, goes_on = (tmp_path / name for name in ("python", "asked", "goes on"))
    python.write_text(
        f'#!/bin/sh\necho >> "{asked}"\nuntil [ -e "{goes_on}" ]; do sleep 0.01; done\necho \'{json.dumps([KEPT])}\'\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    folder = tmp_path / MEASURED
    for _ in range(2):
        begin_process_memory(folder)
    with deadline():
        while not asked.exists():
            time.sleep(0.01)
        goes_on.touch()
        assert process_memory(folder) == OTHER
    assert asked.read_text() == "\n"
    assert process_memory(folder) == OTHER, "now as it is kept"


def test_who_asks_has_the_error_of_what_was_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "identity", lambda: 1 / 0)
    begin_process_memory(tmp_path)
    with pytest.raises(ZeroDivisionError):
        process_memory(tmp_path)


def test_a_process_that_ends_meanwhile_waits_for_nothing_and_leaves_none(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from offstage.stages.machine import process_memory as module;"
        f"module.begin_process_memory(Path({str(tmp_path)!r}));"
        "import psutil\n"
        "while not psutil.Process().children(): time.sleep(0.01)\n"
        "print(psutil.Process().children()[0].pid)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    with deadline(20):
        while psutil.pid_exists(int(done.stdout)):
            time.sleep(0.01)
    assert not (tmp_path / FILE_NAME).exists(), "it didn't end by itself"


def test_other_packages_are_another_environment(tmp_path: Path) -> None:
    tmp_path.joinpath("torch-2.0.dist-info").mkdir()
    before = identity([str(tmp_path), str(tmp_path / "nowhere")])
    assert before == identity([str(tmp_path)])
    tmp_path.joinpath("scipy-1.0.dist-info").mkdir()
    assert identity([str(tmp_path)]) != before
    assert identity() == identity()


def test_what_a_package_brings_along_for_itself_is_no_other_environment(tmp_path: Path) -> None:
    """setuptools appends such a folder to ``sys.path``: a process that imports it had figures of its own."""
    package = tmp_path / "setuptools"
    package.joinpath("_vendor/wheel-1.0.dist-info").mkdir(parents=True)
    package.joinpath("__init__.py").touch()
    assert identity([str(tmp_path), str(package / "_vendor")]) == identity([str(tmp_path)])


def test_a_figure_that_is_made_of_something_else_is_another_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_run(monkeypatch)
    folder, more = tmp_path / MEASURED, {**KEPT, "pinned": 5}
    folder.mkdir(parents=True)
    write_sealed(folder / FILE_NAME, {identity().replace(", ".join(KEPT), ", ".join(more)): more})
    assert process_memory(folder) == nominal()


@pytest.mark.parametrize("accelerator", ["cuda", "hip"])
def test_builds_of_torch_for_accelerators_are_taken_to_hold_more_without_one_too(
    accelerator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = tmp_path / "torch/version.py"
    version.parent.mkdir()
    found = spec_from_file_location("torch", version.with_name("__init__.py"))
    monkeypatch.setattr("offstage.stages.machine.process_memory.find_spec", lambda _: found)
    lines = [f"{name}: Optional[str] = None" for name in ("cuda", "hip")]
    version.write_text("\n".join(lines))
    assert nominal() == NOMINAL
    version.write_text(
        "\n".join(lines).replace(f"{accelerator}: Optional[str] = None", f"{accelerator}: Optional[str] = '13.0'")
    )
    assert nominal().host > NOMINAL.host + 10**8
    version.unlink()
    assert nominal() == NOMINAL


def test_a_machine_with_an_accelerator_has_a_figure_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_to_run(monkeypatch)
    folder = tmp_path / MEASURED
    folder.mkdir(parents=True)
    write_sealed(folder / FILE_NAME, {identity(): asdict(NOMINAL), f"{identity()} on an H100": KEPT})
    assert process_memory(folder) == NOMINAL
    assert process_memory(folder, accelerator="an H100") == OTHER
    assert process_memory(folder, accelerator="another").host > NOMINAL.host, "its context and kernels are the host's"


@pytest.mark.parametrize(
    ("measured", "predicted", "expected"),
    [
        ({"cpu": 404_000_999}, {"cpu": PROCESS_BYTES + 1000}, ProcessMemory(404_000_000)),
        ({"cpu": 404_000_000}, {"cpu": PROCESS_BYTES - 1}, ProcessMemory(408_000_000)),
        ({"cpu": 404_000_000, "0": 50}, {"cpu": PROCESS_BYTES, "0": 49}, ProcessMemory(404_000_000, 4_000_000)),
        ({"cpu": 404_000_000, "0": 1}, {"cpu": PROCESS_BYTES, "0": 2}, ProcessMemory(404_000_000)),
        ({}, {"cpu": 1}, None),
    ],
)  # fmt: skip
def test_it_is_what_a_run_held_less_weights_and_request_in_coarse_steps(
    measured: dict[str, int], predicted: dict[str, int], expected: ProcessMemory | None, tmp_path: Path
) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"memory": {"measured": measured, "predicted": predicted}}))
    assert module._read(path, _plan(tmp_path)) == expected


def test_what_torch_reserves_beside_is_no_part_of_what_was_measured(tmp_path: Path) -> None:
    path, memory = tmp_path / "run.json", {"measured": {"cpu": 1, "0": 9 * 10**6}, "predicted": {"cpu": 0, "0": 10**7}}
    path.write_text(json.dumps({"memory": memory}))
    peaks = module._read(path, _plan(tmp_path, allocator=9 * 10**6))
    assert peaks is not None
    assert peaks.device == 8 * 10**6


def _plan(folder: Path, **ledger: int) -> Path:
    path = folder / "plan.json"
    path.write_text(json.dumps({"devices": {"0": {"ledger": ledger}}}))
    return path


@pytest.mark.parametrize("record", [{"memory": None}, []])
def test_a_record_without_memory_says_nothing(record: object, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(record))
    assert module._read(path, _plan(tmp_path)) is None
