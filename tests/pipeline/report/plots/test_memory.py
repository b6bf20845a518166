"""Peaks against budgets and memory over time: what was measured, what is a bound, and the process without weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offstage.pipeline.report.figures import EARLIER, Picture
from offstage.pipeline.report.plots.memory import (
    BASE,
    BUDGET,
    PREDICTED,
    base_bytes,
    memory_picture,
    timeline_picture,
)
from offstage.pipeline.report.run_folders import Job, find
from tests.pipeline.report.pages import entries, traces
from tests.pipeline.report.sample_runs import write_failure, write_run

BASE_BYTES = 280 * 10**6
PEAK = 10**9
SERIES = [(0.0, 30_000_000), (1.0, 300_000_000), (2.0, 900_000_000)]
MEASURED = "measured peak, cpu"


def drawn(folder: Path) -> Picture:
    """Return the picture of the jobs below ``folder``."""
    jobs = find([folder]).jobs
    picture = memory_picture(jobs, {job.name: job.name for job in jobs}, most=40)
    assert picture
    return picture


def drawn_over_time(folder: Path) -> Picture | None:
    """Return the picture of the jobs below ``folder`` over time."""
    jobs = find([folder]).jobs
    return timeline_picture(jobs, {job.name: f"{job.name} of {len(jobs)}" for job in jobs})


def only(folder: Path) -> Job:
    (job,) = find([folder]).jobs
    return job


def test_the_process_without_weights_is_a_part_of_its_own(tmp_path: Path) -> None:
    plain = drawn(write_run(tmp_path / "0", peak=PEAK))
    assert BASE not in entries(plain)
    assert "begins at its end" not in plain.caption
    known = drawn(write_run(tmp_path / "1", peak=PEAK, metrics={"base_host_bytes": BASE_BYTES}))
    assert (traces(known, BASE)[0].x, traces(known, MEASURED)[0].x) == ((BASE_BYTES,), (PEAK - BASE_BYTES,))
    assert traces(known, BUDGET)[0].x == (BASE_BYTES + 10**9,)
    assert "where the record has that part" in drawn(tmp_path).caption


@pytest.mark.parametrize(("noted", "expected"), [(BASE_BYTES, BASE_BYTES), (2 * PEAK, PEAK), (None, 0)])
def test_the_base_is_a_part_of_the_peak_of_the_host_alone(noted: int | None, expected: int, tmp_path: Path) -> None:
    metrics = {} if noted is None else {"base_host_bytes": noted}
    run = only(write_run(tmp_path / "0", peak=PEAK, metrics=metrics)).run
    assert base_bytes(run, "cpu") == expected
    assert base_bytes(run, "0") == 0


def test_an_earlier_runs_peak_is_an_outline(tmp_path: Path) -> None:
    write_run(tmp_path / "0")
    assert EARLIER not in drawn(tmp_path).caption
    write_run(tmp_path / "1", cached=True)
    (bars,) = traces(drawn(tmp_path), MEASURED)
    assert bars.marker.color == ("var(--cpu)", "var(--page)")
    assert bars.marker.line.color == "var(--cpu)"
    assert EARLIER in drawn(tmp_path).caption


def test_what_was_not_measured_is_a_line_and_no_bar(tmp_path: Path) -> None:
    picture = drawn(write_run(tmp_path / "0", peak=PEAK, budget=PEAK))
    assert entries(picture) == [MEASURED, PREDICTED, BUDGET]
    for name, end in ((PREDICTED, PEAK + 5 * 10**6), (BUDGET, PEAK)):
        (line,) = traces(picture, name)
        assert (line.marker.symbol, line.x) == ("line-ns-open", (end,))


def test_jobs_that_ran_are_drawn_over_time_and_others_are_not(tmp_path: Path) -> None:
    write_run(tmp_path / "0", series=SERIES, cached=True)
    write_run(tmp_path / "1", series=SERIES)
    refused = write_failure(tmp_path / "2") / "run.json"
    content = json.loads(refused.read_text())
    content["memory"]["series"] = {"cpu": SERIES}
    refused.write_text(json.dumps(content))
    broken = write_run(tmp_path / "3", series=SERIES) / "run.json"
    content = json.loads(broken.read_text())
    content |= {"status": "interrupted", "memory": {**content["memory"], "measured": {}}}
    broken.write_text(json.dumps(content))
    picture = drawn_over_time(tmp_path)
    assert picture
    assert entries(picture) == ["#1 of 4", "#3 of 4"]
    (curve,) = traces(picture, "#1 of 4")
    assert list(zip(curve.x, curve.y, strict=True)) == SERIES


def test_without_a_series_of_a_job_that_ran_there_is_no_picture(tmp_path: Path) -> None:
    write_run(tmp_path / "0", series=SERIES, cached=True)
    write_run(tmp_path / "1")
    assert drawn_over_time(tmp_path) is None


def test_the_process_without_weights_is_a_band_and_the_budget_begins_above_it(tmp_path: Path) -> None:
    write_run(tmp_path / "0", series=SERIES, metrics={"base_host_bytes": BASE_BYTES})
    picture = drawn_over_time(tmp_path)
    assert picture
    (band,) = traces(picture, BASE)
    assert (band.y, band.fill) == ((BASE_BYTES, BASE_BYTES), "tozeroy")
    (budget,) = [trace for trace in picture.figure.data if trace.line.dash == "dot"]
    assert budget.y == (BASE_BYTES + 10**9,) * 2
    assert "begins above the process" in picture.caption
