"""Memory over time, of the jobs that ran: one that was refused, or served from the cache, held no weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from offstage.pipeline.report.figures import (
    COLOURS,
    SERIES,
    Key,
    Picture,
    Size,
    dress,
    in_unit,
    measure_linear,
    picture,
    told_first,
)
from offstage.pipeline.report.placements import device_title
from offstage.pipeline.report.plots.memory import BASE, HOST, MOST_DEVICES, base_bytes
from offstage.pipeline.report.records import Number, Run
from offstage.pipeline.report.run_folders import Job
from offstage.pipeline.report.speed import known
from offstage.pipeline.report.table import devices


def timeline_picture(jobs: Sequence[Job], labels: Mapping[str, str]) -> Picture | None:
    """Return memory over time of the jobs that ran, None where no record of one holds a series."""
    timed = [job for job in jobs if _ran(job.run) and any(job.run.series.values())]
    shown, columns = timed[: len(SERIES) - 1], devices(timed, lambda run: dict.fromkeys(run.series))[:MOST_DEVICES]
    if not shown or not columns:
        return None
    bases = [base for job in shown if (base := base_bytes(job.run, HOST))]
    caption = "What each device held while the job ran; a dotted line is where the budget of weights ends."
    caption += " It begins above the process itself." * bool(bases) + told_first(len(shown), len(timed))
    return picture(
        "timeline",
        lambda figure, size: _paint(figure, size, shown, columns),
        title="Memory over time",
        caption=caption,
        keys=[
            *(Key(SERIES[index], "line", labels[job.name]) for index, job in enumerate(shown)),
            *[Key("grid", "fill", BASE)] * bool(bases),
        ],
        height=lambda size: (220 if size.narrow else 260) * len(columns),
    )


def _ran(run: Run) -> bool:
    """Return whether ``run`` came to weights of its own: it measured, or ended early after it had a plan."""
    if run.status == "completed":
        return bool(known(run.measured)) and not run.provenance.is_cached
    return bool(known(run.predicted))


def _paint(figure: Figure, size: Size, jobs: Sequence[Job], columns: Sequence[str]) -> None:
    panels = figure.subplots(len(columns), 1, squeeze=False).ravel()
    for axes, device in zip(panels, columns, strict=True):
        curves = [job.run.series.get(device, ()) for job in jobs]
        limits = [_limit(job.run, device) for job in jobs]
        held = [count for curve in curves for _, count in curve] + [count for count in limits if count is not None]
        seconds = [second for curve in curves for second, _ in curve]
        time_unit = measure_linear(axes, "x", seconds, "seconds", size=size)
        unit = measure_linear(axes, "y", held, "bytes", size=size)
        dress(axes, x_label=in_unit("time", time_unit), y_label=in_unit(device_title(device), unit))
        _band(axes, [base_bytes(job.run, device) for job in jobs])
        for index, (job, curve, limit) in enumerate(zip(jobs, curves, limits, strict=True)):
            colour, url = COLOURS[SERIES[index]], job.link or None
            seconds, held = [second for second, _ in curve], [count for _, count in curve]
            axes.plot(seconds, held, color=colour, linewidth=1.5, url=url)
            if limit is not None:
                axes.axhline(limit, color=colour, linewidth=1.2, linestyle=":")


def _limit(run: Run, device: str) -> Number | None:
    budget = known(run.budget).get(device)
    return None if budget is None else base_bytes(run, device) + budget


def _band(axes: Axes, bases: Sequence[Number]) -> None:
    """Draw what the process is without weights: the jobs' differ by little, and the middle one stands for all."""
    held = [base for base in bases if base]
    if held:
        axes.axhspan(0, median(held), color=COLOURS["grid"], linewidth=0)
