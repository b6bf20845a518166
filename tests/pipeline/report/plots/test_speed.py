"""Seconds a token against the budget, and memory against speed: what the marks and lines are."""

from __future__ import annotations

from pathlib import Path

import pytest

from offstage.pipeline.report.differences import config_differences
from offstage.pipeline.report.figures import EARLIER, Picture
from offstage.pipeline.report.plots.speed import CONTENDED, pareto_picture, speed_picture
from offstage.pipeline.report.run_folders import find
from offstage.pipeline.report.speed import MOST_SERIES, pareto, speed_series
from tests.pipeline.report.pages import entries, traces
from tests.pipeline.report.sample_runs import repeat, write_run

STORED = {"storage_bandwidth_bytes_per_second": 2e9}
PREDICTED, BOUND = "predicted by the plan", "lower bound: bytes moved ÷ bandwidth"


def drawn(folder: Path) -> Picture:
    """Return the picture of the jobs below ``folder`` against their budgets."""
    jobs = find([folder]).jobs
    picture = speed_picture(speed_series(jobs, config_differences(jobs)), jobs)
    assert picture
    return picture


@pytest.mark.parametrize(
    ("seconds", "bound", "named"),
    [(0.5, {}, True), (0.97, {}, False), (1.5, {}, False),
     (0.5, {"predicted_bottleneck": "storage", "lower_bound_seconds_per_token": 0.7}, True),
     (0.5, {"predicted_bottleneck": "host memory", "lower_bound_seconds_per_token": 0.7}, False)],
)  # fmt: skip
def test_a_job_that_is_faster_than_its_storage_is_named(
    seconds: float, bound: dict[str, float | str], named: bool, tmp_path: Path
) -> None:
    write_run(tmp_path / "0", seconds=seconds, streamed=2 * 10**9, metrics={**STORED, **bound})
    picture = drawn(tmp_path)
    (text,) = traces(picture, "measured")[0].hovertext
    assert ("less than its storage needs" in text) is named
    assert ("A token of #0 took less time than the storage needs" in picture.caption) is named


def test_a_mark_that_was_disturbed_is_a_cross_and_says_so(tmp_path: Path) -> None:
    write_run(tmp_path / "0", repeats=[repeat(0.5), repeat(0.6)])
    assert CONTENDED not in drawn(tmp_path).caption
    write_run(tmp_path / "1", budget=2 * 10**9, repeats=[repeat(0.5), repeat(0.6, contended=True)])
    picture = drawn(tmp_path)
    (marks,) = traces(picture, "measured")
    assert marks.marker.symbol == ("circle", "x")
    assert [CONTENDED in text for text in marks.hovertext] == [False, True]
    assert CONTENDED in picture.caption


def test_bars_reach_from_the_least_to_the_largest_sample(tmp_path: Path) -> None:
    write_run(tmp_path / "0", seconds=0.6, repeats=[repeat(seconds) for seconds in (0.5, 0.6, 0.9)])
    bars = traces(drawn(tmp_path), "measured")[0].error_y
    assert bars.visible
    assert (bars.array, bars.arrayminus) == (pytest.approx((0.3,)), pytest.approx((0.1,)))


def test_one_entry_of_the_legend_shows_or_hides_all_that_is_predicted(tmp_path: Path) -> None:
    metrics = {**STORED, "predicted_seconds_per_token": 0.7}
    for number, policy in enumerate(("sequential", "balanced")):
        for budget in (1, 2):
            write_run(tmp_path / f"{number}{budget}", budget=budget * 10**9, policy=policy, metrics=metrics)
    picture = drawn(tmp_path)
    assert entries(picture) == [PREDICTED, BOUND, "device_map=sequential", "device_map=balanced"]
    for name, group in ((PREDICTED, "predicted"), (BOUND, "lower_bound")):
        assert [trace.legendgroup for trace in traces(picture, name)] == [group, group]
        assert all(trace.mode == "lines" for trace in traces(picture, name)), "what isn't measured has no marks"


def test_an_axis_that_is_logarithmic_says_so(tmp_path: Path) -> None:
    for number, seconds in ((1, 10.0), (2, 0.1)):
        write_run(tmp_path / str(number), budget=number * 10**9, seconds=seconds)
    layout = drawn(tmp_path).figure.layout
    assert (layout.yaxis.type, layout.yaxis.title.text) == ("log", "time a token, logarithmic")
    assert (layout.xaxis.type, layout.xaxis.title.text, layout.xaxis.ticksuffix) == ("linear", "budget", "B")


@pytest.mark.parametrize("way", [1, -1], ids=["last", "first"])
def test_jobs_that_share_no_setting_have_no_line_through_them(way: int, tmp_path: Path) -> None:
    number, alone = 0, 4
    for index in range(MOST_SERIES + alone)[::way]:
        for budget in (1, 2) if index < MOST_SERIES else (index,):
            write_run(tmp_path / str(number), budget=budget * 10**9, policy=f"policy {index}")
            number += 1
    picture = drawn(tmp_path)
    (others,) = traces(picture, "all others")
    assert (others.mode, len(others.x)) == ("markers", alone)
    assert len({trace.line.color for trace in picture.figure.data}) == MOST_SERIES + 1, "a colour each"


@pytest.mark.parametrize(
    ("peaks", "label"), [((300, 310), "measured peak, not from zero"), ((100, 310), "measured peak")]
)
def test_an_axis_that_does_not_begin_at_zero_says_so(peaks: tuple[int, int], label: str, tmp_path: Path) -> None:
    for number, peak in enumerate(peaks):
        write_run(tmp_path / str(number), peak=peak * 10**6, seconds=1 / peak, cached=not number)
    picture = pareto_picture(pareto(find([tmp_path]).jobs))
    assert picture
    assert picture.figure.layout.xaxis.title.text == label
    (front,) = traces(picture, "on the front")
    assert front.marker.symbol == ("circle-open", "circle")
    assert EARLIER in picture.caption
