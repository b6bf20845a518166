"""Budget against seconds a token."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from offstage.pipeline.report.figures import Picture, Size, dress, in_unit, measure, picture
from offstage.pipeline.report.plots.series import ends, paint_series, series_caption, series_keys
from offstage.pipeline.report.run_folders import Job
from offstage.pipeline.report.speed import Series, drawn_series


def speed_picture(series: Sequence[Series], jobs: Sequence[Job]) -> Picture | None:
    """Return the plot of the ``series`` of ``jobs``, None where no job has both a budget and a speed."""
    if not series:
        return None
    caption = "Each mark is a job. The budget is that of all devices but the disk, in bytes of weights."
    return picture(
        "speed",
        lambda figure, size: paint_speed(figure.subplots(), series, jobs, size=size),
        title="Budget against seconds a token",
        caption=caption + series_caption(series, jobs),
        keys=series_keys(series),
        height=lambda size: 300 if size.narrow else 400,
    )


def paint_speed(axes: Axes, series: Sequence[Series], jobs: Sequence[Job], *, size: Size) -> None:
    """Draw the ``series`` of ``jobs`` on ``axes``, which get their scales and labels."""
    series = drawn_series(series)
    across, up = ends(series)
    unit = measure(axes, "x", across, "bytes", size=size)
    time_unit = measure(axes, "y", up, "seconds", size=size)
    dress(axes, x_label=in_unit("budget", unit), y_label=in_unit("time a token", time_unit))
    paint_series(axes, series, jobs, size=size)
