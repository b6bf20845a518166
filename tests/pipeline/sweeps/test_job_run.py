"""A job that a queue starts is the one that the sweep prepared; it leaves its exit code, and runs once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offstage.pipeline.record import RunRecord
from offstage.pipeline.sweeps.job_run import PreparedJob, run_job
from offstage.pipeline.sweeps.record import SweepJob


def prepared(folder: Path, **changes: Any) -> PreparedJob:
    given = {
        "known": SweepJob(number=3, overrides=("seed=1", "dtype=none"), folder="3", config=""),
        "sweep": str(folder),
        "folder": str(folder / "3"),
        "config": {},
        "fault": "dtype: 'none' is no dtype",
        "logging": {"version": 1, "root": None},
        "variables": {"A": "1"},
        "is_current": False,
    }
    return PreparedJob(**{**given, **changes})


def test_what_is_queued_is_read_as_it_was(tmp_path: Path) -> None:
    job = prepared(tmp_path)
    job.queue()
    assert PreparedJob.of_queue(tmp_path / "3") == job
    assert job.exit_code() is None


def test_a_faulty_job_leaves_its_exit_code_and_a_record_that_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = prepared(tmp_path)
    job.queue()
    assert job.run_queued(debug=False) == job.exit_code() == 2
    assert capsys.readouterr().err == "offstage: dtype: 'none' is no dtype\n"
    record = RunRecord.load(tmp_path / "3").data
    assert (record["status"], record["overrides"]) == ("failed", ["seed=1", "dtype=none"])
    assert record["error"]["message"] == "dtype: 'none' is no dtype"


def test_a_job_that_completed_is_not_run_again(tmp_path: Path) -> None:
    job = prepared(tmp_path)
    record = RunRecord.start(tmp_path / "3", overrides=job.known.overrides, config={}, environment={})
    record.finish("completed")
    before = record.path.read_bytes()
    assert run_job(job, debug=False) == 0
    assert record.path.read_bytes() == before
