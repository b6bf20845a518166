"""How long each stage took, and which came from the cache."""

from __future__ import annotations

from pathlib import Path

from offstage.pipeline.report.plots.times import stage_picture
from offstage.pipeline.report.run_folders import find
from tests.pipeline.report.pages import entries
from tests.pipeline.report.sample_runs import STAGES, write_failure, write_run


def test_what_comes_from_the_cache_is_hatched(tmp_path: Path) -> None:
    write_run(tmp_path / "0")
    write_run(tmp_path / "1", cached=True)
    write_failure(tmp_path / "2")
    jobs = find([tmp_path]).jobs
    picture = stage_picture(jobs, {job.name: job.name for job in jobs}, most=40)
    assert picture
    assert entries(picture) == list(STAGES)
    for index, trace in enumerate(picture.figure.data):
        assert (trace.x, trace.y) == ((0.25 * (index + 1),) * 2, (0, 1))
        assert trace.marker.pattern.shape == ("", "/")
        assert ["from the cache" in text for text in trace.hovertext] == [False, True]


def test_jobs_that_ended_no_stage_make_no_picture(tmp_path: Path) -> None:
    write_failure(tmp_path / "0")
    assert stage_picture(find([tmp_path]).jobs, {}, most=40) is None
