"""Peaks against budgets: what was measured, what is a bound, and what the process is without weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from offstage.pipeline.report.figures import EARLIER, Picture
from offstage.pipeline.report.plots.memory import BASE, base_bytes, memory_picture
from offstage.pipeline.report.run_folders import Job, find
from tests.pipeline.report.sample_runs import write_run

BASE_BYTES = 280 * 10**6
PEAK = 10**9


def drawn(folder: Path) -> Picture:
    """Return the picture of the jobs below ``folder``."""
    jobs = find([folder]).jobs
    picture = memory_picture(jobs, {job.name: job.name for job in jobs}, most=40)
    assert picture
    return picture


def only(folder: Path) -> Job:
    (job,) = find([folder]).jobs
    return job


def test_the_process_without_weights_is_a_part_of_its_own(tmp_path: Path) -> None:
    plain = drawn(write_run(tmp_path / "0", peak=PEAK))
    assert BASE not in [key.text for key in plain.keys]
    assert "begins at its end" not in plain.caption
    known = drawn(write_run(tmp_path / "1", peak=PEAK, metrics={"base_host_bytes": BASE_BYTES}))
    assert BASE in [key.text for key in known.keys]
    assert known.wide.count("fill: var(--grid)") == plain.wide.count("fill: var(--grid)") + 1
    assert "where the record has that part" in drawn(tmp_path).caption


@pytest.mark.parametrize(("noted", "told"), [(BASE_BYTES, BASE_BYTES), (2 * PEAK, PEAK), (None, 0)])
def test_the_base_is_a_part_of_the_peak_of_the_host_alone(noted: int | None, told: int, tmp_path: Path) -> None:
    metrics = {} if noted is None else {"base_host_bytes": noted}
    run = only(write_run(tmp_path / "0", peak=PEAK, metrics=metrics)).run
    assert base_bytes(run, "cpu") == told
    assert base_bytes(run, "0") == 0


def test_an_earlier_runs_peak_is_an_outline(tmp_path: Path) -> None:
    write_run(tmp_path / "0")
    assert EARLIER not in [key.text for key in drawn(tmp_path).keys]
    bars = drawn(tmp_path).wide.count("fill: var(--cpu)")
    write_run(tmp_path / "1", cached=True)
    assert EARLIER in [key.text for key in drawn(tmp_path).keys]
    assert drawn(tmp_path).wide.count("fill: var(--cpu)") == bars
    assert "stroke: var(--cpu)" in drawn(tmp_path).wide


def test_what_was_not_measured_is_a_line_and_no_mark(tmp_path: Path) -> None:
    picture = drawn(write_run(tmp_path / "0", metrics={"base_host_bytes": BASE_BYTES}))
    assert [key.mark for key in picture.keys][-2:] == ["dotted-tick", "tick"]
    assert "stroke-dasharray" in picture.wide
