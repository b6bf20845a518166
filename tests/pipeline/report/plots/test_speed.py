"""Budget against seconds a token: bounds that are none of the measurements, and jobs that beat them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from offstage.pipeline.report.differences import config_differences
from offstage.pipeline.report.figures import Picture
from offstage.pipeline.report.plots.series import BUSY, CACHED_READS
from offstage.pipeline.report.plots.speed import speed_picture
from offstage.pipeline.report.run_folders import find
from offstage.pipeline.report.speed import MOST_POINTS, MOST_SERIES, speed_series
from tests.pipeline.report.sample_runs import sample, write_run

STORED = {"storage_bandwidth_bytes_per_second": 2e9}


def drawn(folder: Path) -> Picture:
    """Return the picture of the jobs below ``folder``."""
    jobs = find([folder]).jobs
    picture = speed_picture(speed_series(jobs, config_differences(jobs)), jobs)
    assert picture
    return picture


@pytest.mark.parametrize(
    ("seconds", "bound", "named"),
    [(0.5, {}, True), (0.97, {}, False), (1.5, {}, False),
     (0.5, {"predicted_bound": "storage", "bound_seconds_per_token": 0.7}, True),
     (0.5, {"predicted_bound": "host memory", "bound_seconds_per_token": 0.7}, False)],
)  # fmt: skip
def test_a_job_that_is_faster_than_its_storage_is_named(
    seconds: float, bound: dict[str, float | str], named: bool, tmp_path: Path
) -> None:
    write_run(tmp_path / "0", seconds=seconds, streamed=2 * 10**9, metrics={**STORED, **bound})
    picture = drawn(tmp_path)
    assert (f">{CACHED_READS}<" in picture.wide) is named
    assert ("(#0): they came from the system's page cache" in picture.caption) is named


def test_of_thousands_of_jobs_the_caption_says_how_many_are_drawn(tmp_path: Path) -> None:
    (job,) = find([write_run(tmp_path / "0", metrics=STORED)]).jobs
    jobs = [
        replace(job, name=f"#{number}", run=replace(job.run, budget={"cpu": 10**9 + number}))
        for number in range(2 * MOST_POINTS)
    ]
    picture = speed_picture(speed_series(jobs, []), jobs)
    assert picture
    drawn = picture.wide.count("<use") - 1
    assert 0 < drawn <= MOST_POINTS
    assert f"Of {2 * MOST_POINTS:,} jobs {drawn:,} are drawn" in picture.caption


def test_a_job_that_was_disturbed_is_crossed_out(tmp_path: Path) -> None:
    write_run(tmp_path / "0", samples=[sample(0.5), sample(0.6)])
    calm = drawn(tmp_path)
    assert BUSY not in [key.text for key in calm.keys]
    assert "stroke: var(--ink)" not in calm.wide
    write_run(tmp_path / "1", budget=2 * 10**9, samples=[sample(0.5), sample(0.6, busy=True)])
    picture = drawn(tmp_path)
    assert BUSY in [key.text for key in picture.keys]
    assert "stroke: var(--ink)" in picture.wide


def test_what_cannot_be_is_shaded_and_has_no_marks(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        write_run(tmp_path / str(number), budget=number * 10**9, streamed=(4 - number) * 10**9, metrics=STORED)
    picture = drawn(tmp_path)
    assert "opacity: 0.07" in picture.wide
    assert picture.wide.count("<use") == 3 + 1, "a mark for each that was measured, and the shade"


def test_an_axis_that_is_logarithmic_says_so(tmp_path: Path) -> None:
    for number, seconds in ((1, 10.0), (2, 0.1)):
        write_run(tmp_path / str(number), budget=number * 10**9, seconds=seconds)
    assert "time a token, logarithmic" in drawn(tmp_path).wide
    assert "budget, GB" in drawn(tmp_path).wide


def test_jobs_that_share_no_setting_have_no_line_through_them(tmp_path: Path) -> None:
    number, alone = 0, 4
    for index in range(MOST_SERIES + alone):
        for budget in (1, 2) if index < MOST_SERIES else (index,):
            write_run(tmp_path / str(number), budget=budget * 10**9, policy=f"policy {index}")
            number += 1
    picture = drawn(tmp_path)
    assert "all others" in [key.text for key in picture.keys]
    assert picture.wide.count("stroke: var(--rest)") == alone, "the marks' rims, and nothing else"
