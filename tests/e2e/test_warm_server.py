"""The server of forks: a fork is to a test what a process is, and is made only where nothing tells them apart."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tests.e2e.conftest as harness
from offstage.pipeline import job_process
from tests.deadline import deadline
from tests.e2e.conftest import (
    Finished,
    Process,
    environment,
    finish,
    records_in,
    start,
    start_anew,
    start_job,
    wait_for,
    warm_server,
)
from tests.e2e.warm_server import ForkedCommand, of_imports

ENDLESS = ("generate.max_new_tokens=100000", "generate.min_new_tokens=100000")


@pytest.fixture(autouse=True)
def _forks() -> None:
    assert of_imports(environment()) == of_imports(harness._ENVIRONMENT), "no test forks: its environment isn't that"
    if warm_server(environment()) is None:
        pytest.skip("may not fork: imports start threads here, or there are no pidfds")


@pytest.mark.from_nothing
@pytest.mark.parametrize(
    "arguments", [pytest.param(("--cfg", "job"), marks=pytest.mark.long_form), ("model=pretraind",)]
)
def test_a_fork_prints_and_ends_as_a_process_does(arguments: tuple[str, ...], tmp_path: Path) -> None:
    forked, process = (finish(begin(tmp_path, *arguments), tmp_path, {}) for begin in (start, start_anew))
    assert (forked.code, forked.out, forked.err) == (process.code, process.out, process.err)
    assert forked.out + forked.err


def test_a_fork_heeds_signals_and_tells_which_one_killed_it(fresh_folder: Path) -> None:
    ended = {}
    for number in (signal.SIGINT, signal.SIGKILL):
        before = records_in(fresh_folder)
        with start(fresh_folder, *ENDLESS) as process:
            assert isinstance(process, ForkedCommand)
            wait_for(lambda known=before: records_in(fresh_folder).keys() > known.keys(), process)
            process.send_signal(number)
            ended[number] = process.wait(120)
    assert ended == {signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL}


def test_a_fork_that_a_test_has_no_more_time_for_is_ended(tmp_path: Path) -> None:
    with start(tmp_path, entry="signal:pause") as process:
        with pytest.raises(AssertionError, match="after 1 s"), deadline(1):
            process.communicate()
        assert process.wait(20) == -signal.SIGKILL


def test_a_fork_that_does_not_end_in_time_is_an_error_and_goes_on_no_more(fresh_folder: Path) -> None:
    process = start(fresh_folder, *ENDLESS)
    wait_for(lambda: records_in(fresh_folder), process)
    with pytest.raises(subprocess.TimeoutExpired):
        process.communicate(timeout=0.1)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL


def test_what_runs_inside_this_process_leave_in_its_environment_is_no_reason_for_a_process(
    offstage_here: Callable[..., Finished],
) -> None:
    assert offstage_here("generate.max_new_tokens=1").code == 0
    assert warm_server(environment()) is not None


def test_the_jobs_of_a_sweep_in_this_process_are_forks_that_complete(
    offstage_here: Callable[..., Finished], jobs_fork: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Process] = []

    def start_noted(*command: Any, **options: Any) -> Process:
        started.append(start_job(*command, **options))
        return started[-1]

    monkeypatch.setattr(job_process.subprocess, "Popen", start_noted)
    done = offstage_here("-m", "seed=0,1", "generate.max_new_tokens=1")
    assert [record["status"] for record in done.records] == ["completed", "completed"], done.err
    assert [type(job) for job in started] == [ForkedCommand, ForkedCommand]


@pytest.mark.parametrize("name", ["HF_HOME", "OMP_NUM_THREADS", "PYTHONIOENCODING", "LC_ALL"])
def test_what_an_import_could_read_is_a_reason_for_a_process(name: str) -> None:
    assert warm_server(environment({name: "other"})) is None
    same = dict.fromkeys(("TERM", "PYTEST_CURRENT_TEST", "XDG_DATA_HOME"), "other")
    assert warm_server(environment(same)) is not None
