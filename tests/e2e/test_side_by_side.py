"""Jobs of a sweep side by side on this machine: each in a process of its own, and each record says so."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from offstage.pipeline.environment import allowed_cores
from tests.e2e.conftest import enter, finish, records_in, start, start_anew
from tests.e2e.test_sweep import SLOW, by_number, job_processes, working_job


def overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(max(one["started"], other["started"]) < min(one["finished"], other["finished"]))


def test_jobs_answer_side_by_side_as_they_do_in_turn_and_their_records_say_that_seconds_are_contended(
    fresh_folder: Path, jobs_fork: None, capfd: pytest.CaptureFixture[str]
) -> None:
    code = enter(fresh_folder, "-m", "generate.max_new_tokens=3,5,none_at_all", "hydra.launcher.n_jobs=2")
    said = capfd.readouterr()
    assert code == 2, said.err
    records = by_number(fresh_folder)
    assert [records[number]["status"] for number in range(3)] == ["completed", "completed", "failed"]
    assert {record["environment"]["jobs_beside"] for record in records.values()} == {1}
    answers = [records[number]["outputs"][0]["token_ids"] for number in range(2)]
    assert list(map(len, answers)) == [3, 5]
    assert answers[0] == answers[1][:3]
    assert overlap(records[0], records[1])
    assert "generate.max_new_tokens" in records[2]["error"]["message"]
    assert "2 of 3 completed, 1 failed" in said.out
    assert "Traceback" not in said.err + said.out


def test_plans_alone_are_made_side_by_side_unless_it_is_said_otherwise(fresh_folder: Path, jobs_fork: None) -> None:
    done = finish(start(fresh_folder, "-m", "stages=plan_only", "max_memory.cpu=2MB,3MB"), fresh_folder, {})
    assert done.code == 0, done.err
    beside = min(len(allowed_cores()), 2) - 1
    assert {record["environment"]["jobs_beside"] for record in records_in(fresh_folder).values()} == {beside}
    (fresh_folder / "other").mkdir()
    one = ("-m", "stages=plan_only", "max_memory.cpu=2MB,3MB", "hydra.launcher.n_jobs=1")
    assert enter(fresh_folder / "other", *one) == 0
    records = records_in(fresh_folder / "other").values()
    assert [record["environment"]["jobs_beside"] for record in records] == [0, 0]


@pytest.mark.long_form
def test_an_interrupt_ends_all_that_are_at_work_and_their_records_say_so(fresh_folder: Path) -> None:
    sweep = start_anew(fresh_folder, "-m", SLOW, "generate.max_new_tokens=2001,2002,2003", "hydra.launcher.n_jobs=2")
    for number in (0, 1):
        working_job(fresh_folder, number)
    sweep.send_signal(signal.SIGINT)
    done = finish(sweep, fresh_folder, {})
    assert done.code == 130, done.err
    records = by_number(fresh_folder)
    assert {number: record["status"] for number, record in records.items()} == {0: "interrupted", 1: "interrupted"}
    assert "2 interrupted, 1 not begun" in done.out
    assert list(job_processes(fresh_folder)) == []


@pytest.mark.long_form
def test_jobs_end_with_their_sweep(fresh_folder: Path) -> None:
    sweep = start_anew(fresh_folder, "-m", SLOW, "generate.max_new_tokens=2001,2002", "hydra.launcher.n_jobs=2")
    for number in (0, 1):
        working_job(fresh_folder, number)
    sweep.kill()
    finish(sweep, fresh_folder, {})
    deadline = time.monotonic() + 30
    while list(job_processes(fresh_folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert list(job_processes(fresh_folder)) == []
