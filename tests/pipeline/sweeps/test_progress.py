"""How far a sweep is, in plain lines: which job, of how many, how long the others will take."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from offstage.pipeline.record import RunRecord
from offstage.pipeline.sweeps.progress import SweepProgress, duration
from offstage.pipeline.sweeps.record import Sweep
from tests.pipeline.sweeps.sample_sweeps import sweep_of


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    seconds = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    return seconds


def complete(folder: Path, number: int) -> None:
    RunRecord.start(folder / str(number), overrides=[f"seed={number}"], config={}, environment={}).finish("completed")


def test_each_line_has_the_job_the_count_and_the_time_left(
    tmp_path: Path, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    progress = SweepProgress(Sweep(tmp_path, sweep_of(4)))
    progress.begin([0])
    complete(tmp_path, 0)
    clock[0] += 30
    progress.end(0)
    progress.begin([1])
    clock[0] += 10
    complete(tmp_path, 1)
    progress.end(1)
    assert capsys.readouterr().out.splitlines() == [
        "job 0  seed=0  is 1 of 4",
        "job 0  seed=0  completed in 0.0 s; 1 of 4 ended; about 1 min 30 s left",
        "job 1  seed=1  is 2 of 4; about 1 min 30 s left",
        "job 1  seed=1  completed in 0.0 s; 2 of 4 ended; about 40 s left",
    ]


def test_jobs_that_work_at_a_time_are_reckoned_by_how_often_one_ends(
    tmp_path: Path, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    progress = SweepProgress(Sweep(tmp_path, sweep_of(6)))
    progress.begin(range(6))
    clock[0] += 20
    for number in range(2):
        complete(tmp_path, number)
        progress.end(number)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "6 jobs at work or queued, 0 of 6 ended"
    assert lines[2].endswith("2 of 6 ended; about 40 s left")


def test_a_resumed_sweep_counts_what_is_done_and_a_lost_job_is_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Sweep(tmp_path, sweep_of(3)).close()
    complete(tmp_path, 1)
    progress = SweepProgress(Sweep(tmp_path, sweep_of(3)))
    progress.begin([0])
    progress.end(0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"resumed: 1 of 3 completed, 2 not begun, {tmp_path}"
    assert lines[1] == "job 0  seed=0  is 2 of 3"
    assert lines[2].startswith("job 0  seed=0  lost: its process was lost before it could say why")
    assert "; 2 of 3 ended" in lines[2]


def test_on_a_terminal_one_line_lives_and_is_gone_before_the_next(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = SweepProgress(Sweep(tmp_path, sweep_of(3)))
    progress.begin([0])
    for _ in range(8):
        clock[0] += 0.5
        progress.refresh()
    complete(tmp_path, 0)
    progress.end(0)
    shown = capsys.readouterr()
    assert shown.out == "job 0  seed=0  completed in 0.0 s; 1 of 3 ended; about 8.0 s left\n"
    lines = shown.err.split("\r\x1b[2K")[1:]
    assert [line.strip() for line in lines] == [
        *(f"job 0  seed=0  is 1 of 3, for {seconds}.0 s" for seconds in range(5)), ""
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(3.21, "3.2 s"), (9.96, "10 s"), (59.7, "1 min 0 s"), (200, "3 min 20 s"), (7300, "2 h 1 min")],
)
def test_a_duration_has_the_units_that_fit(seconds: float, words: str) -> None:
    assert duration(seconds) == words
