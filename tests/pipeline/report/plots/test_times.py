"""How far repeats lie apart: a row a job, a mark a repeat, which says how it was taken."""

from __future__ import annotations

from pathlib import Path

from offstage.pipeline.report.figures import Picture
from offstage.pipeline.report.noise import noise
from offstage.pipeline.report.plots.times import repeat_picture
from offstage.pipeline.report.run_folders import find
from tests.pipeline.report.pages import entries, traces
from tests.pipeline.report.sample_runs import repeat, write_run

TIMES = (0.5, 0.6, 0.9)


def drawn(folder: Path) -> Picture | None:
    """Return the picture of the jobs below ``folder``."""
    jobs = find([folder]).jobs
    return repeat_picture(jobs, {job.name: f"called {job.name}" for job in jobs}, noise(jobs), most=40)


def test_each_panel_has_every_repeat_of_its_kind(tmp_path: Path) -> None:
    write_run(tmp_path / "0", repeats=[repeat(seconds) for seconds in TIMES])
    write_run(
        tmp_path / "1", repeats=[repeat(0.7, earlier=True), repeat(0.8, contended=True), repeat(9.0, counts=False)]
    )
    picture = drawn(tmp_path)
    assert picture
    assert entries(picture) == [
        "the middle half", "a repeat", "taken by an earlier run", "taken while others used the processor",
    ]  # fmt: skip
    prompt, decoding = traces(picture, "a repeat")
    assert (decoding.x, decoding.y) == (TIMES, (0, 0, 0))
    assert prompt.x == tuple(3 * seconds for seconds in TIMES)
    assert traces(picture, "taken by an earlier run")[1].x == (0.7,)
    assert traces(picture, "taken while others used the processor")[1].x == (0.8,)
    assert picture.figure.layout.yaxis.ticktext == ("called #0", "called #1")


def test_the_whiskers_reach_to_the_least_and_the_largest(tmp_path: Path) -> None:
    write_run(tmp_path / "0", repeats=[repeat(seconds) for seconds in (*TIMES, 40.0)])
    picture = drawn(tmp_path)
    assert picture
    _, decoding = traces(picture, "the middle half")
    assert decoding.x == (*TIMES, 40.0)
    assert decoding.boxpoints is False, "plotly's whiskers leave far repeats out where it draws points itself"


def test_one_sample_makes_no_picture(tmp_path: Path) -> None:
    write_run(tmp_path / "0", repeats=[repeat(0.5)])
    assert drawn(tmp_path) is None
