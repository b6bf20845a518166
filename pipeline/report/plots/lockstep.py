"""Lockstep: how many batches share each pass against seconds a token, where a sweep has several such numbers."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from offstage.pipeline.report.differences import config_differences
from offstage.pipeline.report.figures import Picture, Size, dress, in_unit, measure, measure_counts, picture
from offstage.pipeline.report.plots.series import ends, paint_series, series_caption, series_keys
from offstage.pipeline.report.run_folders import Job
from offstage.pipeline.report.speed import Series, drawn_series, lockstep_series, members


def lockstep_picture(jobs: Sequence[Job]) -> Picture | None:
    """Return the plot of the ``jobs`` that differ in how many share a pass, None where none do."""
    if len({members(job.run) for job in jobs} - {None}) < 2:
        return None
    series = [
        entry
        for entry in lockstep_series(jobs, config_differences(jobs))
        if len({point.x for point in entry.measured}) > 1
    ]
    if not series:
        return None
    caption = "Each mark is a job: what streams is shared by all that go together, what each computes isn't."
    return picture(
        "lockstep",
        lambda figure, size: _paint(figure, size, series, jobs),
        title="Lockstep against seconds a token",
        caption=caption + series_caption(series, jobs),
        keys=series_keys(series),
        height=lambda size: 300 if size.narrow else 400,
    )


def _paint(figure: Figure, size: Size, series: Sequence[Series], jobs: Sequence[Job]) -> None:
    axes = figure.subplots()
    series = drawn_series(series)
    across, up = ends(series)
    scale = measure_counts(axes, across)
    time_unit = measure(axes, "y", up, "seconds", size=size)
    dress(axes, x_label=in_unit("batches that share a pass", scale), y_label=in_unit("time a token", time_unit))
    paint_series(axes, series, jobs, size=size)
