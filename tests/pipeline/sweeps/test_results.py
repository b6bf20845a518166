"""The closing table of a sweep says where each figure comes from, and has every job, those too that never began."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from offstage.pipeline.job_folder import JobFolder
from offstage.pipeline.record import RunRecord
from offstage.pipeline.sweeps import results
from offstage.pipeline.sweeps.results import settled, show_sweep
from tests.pipeline.report.sample_runs import repeat, write_failure, write_run
from tests.pipeline.sweeps.sample_sweeps import sweep_of


def test_figures_that_were_measured_earlier_or_while_others_computed_are_said_to_be_so(tmp_path: Path) -> None:
    write_run(tmp_path / "0", repeats=[repeat(0.5), repeat(0.6, contended=True)])
    write_run(tmp_path / "1", repeats=[repeat(0.5, earlier=True)], cached=True)
    write_failure(tmp_path / "2")
    RunRecord.load(tmp_path / "1").note_enforcement(bytes_allowed=None, how="nothing was loaded")
    console = Console(file=io.StringIO(), width=400)
    given = (("device_map=sequential",), ("device_map=sequential",), ())
    jobs = [replace(job, overrides=overrides) for job, overrides in zip(sweep_of(3).jobs, given, strict=True)]
    show_sweep(console, tmp_path, replace(sweep_of(3), jobs=tuple(jobs)), ended=range(3))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "measured" in lines[0]
    assert "measured, median of 2, 1 contended" in lines[1]
    assert "measured earlier" in lines[2]
    assert "no memory cap was tested: nothing was loaded" in lines[2]
    assert "measured" not in lines[3]


def test_every_job_is_there_with_its_folder_and_the_command_that_resumes(tmp_path: Path) -> None:
    record = RunRecord.start(tmp_path / "0", overrides=["seed=0"], config={}, environment={})
    record.finish("completed")
    record = RunRecord.start(tmp_path / "1", overrides=["seed=1"], config={}, environment={})
    record.finish("interrupted", error=KeyboardInterrupt())
    console = Console(file=io.StringIO(), width=400)
    show_sweep(console, tmp_path, sweep_of(12), ended=[0, 5])
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    words = ["completed", "interrupted", *["not begun"] * 3, "lost", *["not begun"] * 6]
    assert all(word in line for word, line in zip(words, lines[1:13], strict=True))
    assert [line.split()[-1] for line in lines[1:13]] == [str(number) for number in range(12)]
    assert lines[-2] == f"1 of 12 completed, 1 interrupted, 9 not begun, 1 lost, {tmp_path}"
    assert lines[-1] == f"to run what isn't completed: offstage-sweep resume {tmp_path}"


def test_a_job_that_somebody_is_still_at_is_not_marked_as_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_PATIENCE", 0.1)
    job = sweep_of(1).jobs[0]
    record = RunRecord.start(tmp_path / "0", overrides=["seed=0"], config={}, environment={})
    with JobFolder(tmp_path / "0") as folder:
        assert folder.taken()
        assert settled(tmp_path, job).status == "running"
        assert RunRecord.load(record.path).data["status"] == "running"
    assert settled(tmp_path, job).status == RunRecord.load(record.path).data["status"] == "failed"
