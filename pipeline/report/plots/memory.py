"""Memory against the budget: by job and device, and over time where the records hold a series."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline.report.figures import (
    COLOURS,
    SERIES,
    Key,
    Picture,
    Size,
    bar_place,
    device_colour,
    dress,
    in_unit,
    measure_linear,
    name_rows,
    picture,
    row_height,
    told_first,
)
from pipeline.report.placements import device_title
from pipeline.report.run_folders import Job
from pipeline.report.speed import known
from pipeline.report.table import devices

MOST_DEVICES = 4


def memory_picture(jobs: Sequence[Job], labels: Mapping[str, str], *, most: int) -> Picture | None:
    """Return budget, prediction and measured peak by device, None where no job measured any."""
    measured = [job for job in jobs if known(job.run.measured)]
    rows, columns = measured[:most], devices(measured, lambda run: run.measured)[:MOST_DEVICES]
    if not rows or not columns:
        return None
    caption = (
        "The budget counts weights alone; peaks count all that the process holds, on the cpu Python and torch too."
    )
    caption += told_first(len(rows), len(measured))
    return picture(
        "memory",
        lambda figure, size: _paint(figure, size, rows, columns, labels),
        title="Memory against the budget",
        caption=caption,
        keys=[
            *(Key(device_colour(device), "fill", f"measured peak, {device_title(device)}") for device in columns),
            Key("ink", "mark-D", "predicted peak"),
            Key("ink", "tick", "budget of weights"),
        ],
        height=lambda size: (90 + row_height(size) * len(rows)) * (len(columns) if size.narrow else 1),
    )


def _paint(figure: Figure, size: Size, rows: Sequence[Job], columns: Sequence[str], labels: Mapping[str, str]) -> None:
    shape = (len(columns), 1) if size.narrow else (1, len(columns))
    panels = figure.subplots(*shape, squeeze=False).ravel()
    for place, (axes, device) in enumerate(zip(panels, columns, strict=True)):
        _panel(axes, rows, device, size=size)
        name_rows(axes, [labels[job.name] for job in rows], size=size)
        if place and not size.narrow:
            axes.set_yticks([])


def _panel(axes: Axes, rows: Sequence[Job], device: str, *, size: Size) -> None:
    offset, height = bar_place(size)
    runs = [job.run for job in rows]
    every = [known(held).get(device, 0) for run in runs for held in (run.budget, run.predicted, run.measured)]
    unit = measure_linear(axes, "x", every, "bytes", size=size)
    dress(axes, x_label=in_unit(device_title(device), unit))
    for row, run in enumerate(runs):
        axes.barh(
            row + offset, known(run.measured).get(device, 0), height, color=COLOURS[device_colour(device)], linewidth=0
        )
        _mark(axes, known(run.predicted).get(device), row + offset, "D", 6)
        _mark(axes, known(run.budget).get(device), row + offset, "|", 15)


def _mark(axes: Axes, value: float | None, row: float, marker: str, size: float) -> None:
    """Draw a mark with a rim in the page's colour, so that it shows on a bar in either scheme."""
    if value is None:
        return
    for colour, length, width in (("page", size + 3, 4.5), ("ink", size, 1.6)):
        axes.plot(
            [value], [row], marker, color=COLOURS[colour], markerfacecolor=COLOURS["page"], markersize=length,
            markeredgewidth=width, clip_on=False,
        )  # fmt: skip


def timeline_picture(jobs: Sequence[Job]) -> Picture | None:
    """Return memory over time, None where no record holds a series."""
    timed = [job for job in jobs if any(job.run.series.values())]
    shown, columns = timed[: len(SERIES) - 1], devices(timed, lambda run: dict.fromkeys(run.series))[:MOST_DEVICES]
    if not shown or not columns:
        return None
    more = told_first(len(shown), len(timed))
    return picture(
        "timeline",
        lambda figure, size: _paint_time(figure, size, shown, columns),
        title="Memory over time",
        caption=f"What each device held while the job ran; a dotted line is the budget of weights.{more}",
        keys=[Key(SERIES[index], "line", job.name) for index, job in enumerate(shown)],
        height=lambda size: (220 if size.narrow else 260) * len(columns),
    )


def _paint_time(figure: Figure, size: Size, jobs: Sequence[Job], columns: Sequence[str]) -> None:
    panels = figure.subplots(len(columns), 1, squeeze=False).ravel()
    for axes, device in zip(panels, columns, strict=True):
        curves = [job.run.series.get(device, ()) for job in jobs]
        budgets = [known(job.run.budget).get(device) for job in jobs]
        held = [count for curve in curves for _, count in curve] + [count for count in budgets if count is not None]
        seconds = [second for curve in curves for second, _ in curve]
        time_unit = measure_linear(axes, "x", seconds, "seconds", size=size)
        unit = measure_linear(axes, "y", held, "bytes", size=size)
        dress(axes, x_label=in_unit("time", time_unit), y_label=in_unit(device_title(device), unit))
        for index, (curve, budget) in enumerate(zip(curves, budgets, strict=True)):
            colour = COLOURS[SERIES[index]]
            axes.plot([second for second, _ in curve], [count for _, count in curve], color=colour, linewidth=1.5)
            if budget is not None:
                axes.axhline(budget, color=colour, linewidth=1.2, linestyle=":")
