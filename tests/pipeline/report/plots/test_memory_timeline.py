"""Memory over time, of those jobs that held weights."""

from __future__ import annotations

import json
from pathlib import Path

from offstage.pipeline.report.figures import Picture
from offstage.pipeline.report.plots.memory import BASE
from offstage.pipeline.report.plots.memory_timeline import timeline_picture
from offstage.pipeline.report.run_folders import find
from tests.pipeline.report.sample_runs import write_failure, write_run

SERIES = [(0.0, 30_000_000), (1.0, 300_000_000), (2.0, 900_000_000)]


def drawn(folder: Path) -> Picture | None:
    """Return the picture of the jobs below ``folder``."""
    jobs = find([folder]).jobs
    return timeline_picture(jobs, {job.name: f"{job.name} of {len(jobs)}" for job in jobs})


def test_jobs_that_ran_are_drawn_and_others_are_not(tmp_path: Path) -> None:
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
    picture = drawn(tmp_path)
    assert picture
    assert [key.text for key in picture.keys] == ["#1 of 4", "#3 of 4"]


def test_without_a_series_of_a_job_that_ran_there_is_no_picture(tmp_path: Path) -> None:
    write_run(tmp_path / "0", series=SERIES, cached=True)
    write_run(tmp_path / "1")
    assert drawn(tmp_path) is None


def test_the_process_without_weights_is_a_band_and_the_budget_begins_above_it(tmp_path: Path) -> None:
    write_run(tmp_path / "0", series=SERIES, metrics={"base_host_bytes": 280_000_000})
    picture = drawn(tmp_path)
    assert picture
    assert picture.keys[-1].text == BASE
    assert "fill: var(--grid)" in picture.wide
    assert "begins above the process" in picture.caption
