"""Seconds a token against the budget, and memory against speed: a mark a job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import Any

import plotly.graph_objects as go

from offstage.pipeline.metrics import KIND_TITLES
from offstage.pipeline.report.figures import (
    EARLIER,
    SERIES,
    Picture,
    colour,
    figure,
    hover_text,
    named,
    scale,
    shown,
)
from offstage.pipeline.report.noise import SECONDS
from offstage.pipeline.report.quantities import listed, tell
from offstage.pipeline.report.run_folders import Job
from offstage.pipeline.report.speed import (
    LOWER_BOUND_SECONDS,
    OTHERS,
    PREDICTED_BOTTLENECK,
    Front,
    Point,
    Series,
)

CONTENDED = "others used the processor meanwhile"
STORAGE = "storage"
_MARKERS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "hexagon")
_MEANINGS = {
    "predicted": ("dash", "predicted by the plan"),
    "lower_bound": ("dot", "lower bound: bytes moved ÷ bandwidth"),
}
_LACKING = {"predicted": "the prediction", "lower_bound": "the storage's bandwidth, for the lower bound"}
_CROWD = 90
"""Past this many points marks are small."""
_CLEARLY = 0.95
"""A job beats its bound with less than this share of the seconds: rates aren't known to the percent."""


def speed_picture(series: Sequence[Series], jobs: Sequence[Job]) -> Picture | None:
    """Return the plot of the ``series`` of ``jobs``, None where no job has both a budget and a speed."""
    if not series:
        return None
    caption = "Each mark is a job. The budget is that of all devices but the disk, in bytes of weights."
    title = "Budget against seconds a token"
    return Picture("speed", title, caption + _caption(series, jobs), _series_figure(series, jobs))


def pareto_picture(front: Front) -> Picture | None:
    """Return the plot of ``front``, None where no job has both a peak and a speed."""
    if not front.points:
        return None
    best = {(point.x, point.y) for point in front.best}
    beaten = [point for point in front.points if (point.x, point.y) not in best]
    x_axis = scale("measured peak", "bytes", [point.x for point in front.points])
    if (least := min(point.x for point in front.points)) > max(point.x for point in front.points) / 2 and least > 0:
        x_axis |= {"rangemode": "normal", "title": {"text": "measured peak, not from zero"}}
    y_axis = scale("tokens a second", "rate", [point.y for point in front.points])
    traces = [
        _jobs_of(beaten, {"color": colour("rest"), "size": 7}, name="beaten by another job", mode="markers"),
        _jobs_of(
            front.best, {"color": SERIES[0], "size": 11}, name="on the front", mode="lines+markers",
            line={"shape": "hv", "color": SERIES[0], "width": 1.5},
        ),
    ]  # fmt: skip
    caption = "Upwards is faster, leftwards takes less memory: the measured peak of all devices, on the host the"
    caption += " process itself too. No job beats one on the front in both." + _hollow(front.points)
    drawn = figure((trace for trace in traces if trace.x), xaxis=x_axis, yaxis=y_axis, showlegend=True)
    return Picture("pareto", "Memory against speed", caption, drawn)


def _jobs_of(points: Sequence[Point], marker: dict[str, Any], **more: Any) -> go.Scatter:
    texts = [
        hover_text(
            point.job, f"measured peak {tell(point.x, 'bytes')}", f"{point.y:,.2f} tokens/s", EARLIER * point.cached
        )
        for point in points
    ]
    symbols = ["circle-open" if point.cached else "circle" for point in points]
    return go.Scatter(
        x=[point.x for point in points], y=[point.y for point in points], marker={**marker, "symbol": symbols},
        **shown(texts, [point.link for point in points]), **more,
    )  # fmt: skip


def _points(series: Sequence[Series]) -> list[Point]:
    return [point for entry in series for name in ("measured", *_MEANINGS) for point in getattr(entry, name)]


def _series_figure(series: Sequence[Series], jobs: Sequence[Job]) -> go.Figure:
    ends = [end for point in _points(series) for end in (point.least, point.y, point.largest) if end is not None]
    colours = iter(SERIES)
    inks = [colour("rest") if entry.name == OTHERS else next(colours) for entry in series]
    traces = [trace for entry, ink in zip(series, inks, strict=True) for trace in _lines(entry, ink)]
    for name in _MEANINGS:  # one entry of the legend stands for all of a kind, and shows or hides them
        for trace in [each for each in traces if each.legendgroup == name][1:]:
            trace.showlegend = False
    beat = frozenset(faster_than_storage(jobs))
    traces += [_measured(entry, index, inks[index], beat) for index, entry in enumerate(series)]
    axis = scale("budget", "bytes", [point.x for point in _points(series)])
    return figure(traces, xaxis=axis, yaxis=scale("time a token", "seconds", ends), showlegend=True)


def _lines(entry: Series, ink: str) -> Iterator[go.Scatter]:
    """Yield the lines of one series that are not measured; what isn't one setting has none. The marks tell theirs."""
    for name, (dash, text) in _MEANINGS.items() if entry.name != OTHERS else ():
        if points := getattr(entry, name):
            yield go.Scatter(
                x=[point.x for point in points], y=[point.y for point in points], name=named(text), legendgroup=name,
                mode="lines" if len(points) > 1 else "markers", line={"color": ink, "dash": dash, "width": 1.5},
                marker={"color": ink, "symbol": "line-ew-open", "size": 24}, hoverinfo="skip",
            )  # fmt: skip


def _measured(entry: Series, index: int, ink: str, beat: Set[str]) -> go.Scatter:
    """Return a mark a job with a bar from its least to its largest repeat, hollow where an earlier run took them."""
    points, shape = entry.measured, _MARKERS[index % len(_MARKERS)]
    also: dict[str, list[str]] = {point.job: [] for point in points}
    for name in _MEANINGS:
        for point in getattr(entry, name):
            also[point.job].append(f"{KIND_TITLES[name]} {tell(point.y, 'seconds')}")
    for job in beat & also.keys():
        also[job].append("less than its storage needs")
    texts = [_told(point, entry.name, also[point.job]) for point in points]
    spread = any(point.least is not None for point in points)
    bars = {
        "array": [(point.largest or point.y) - point.y for point in points],
        "arrayminus": [point.y - (point.y if point.least is None else point.least) for point in points],
        "thickness": 1.4,
        "visible": spread,
    }
    return go.Scatter(
        x=[point.x for point in points], y=[point.y for point in points], name=named(entry.name or "measured"),
        mode="markers" if entry.name == OTHERS else "lines+markers", line={"color": ink, "width": 1.8}, error_y=bars,
        marker={
            "size": 10 if len(points) < _CROWD else 5,
            "color": ink,
            "symbol": [("x" if point.contended else shape) + "-open" * point.cached for point in points],
        },
        **shown(texts, [point.link for point in points]),
    )  # fmt: skip


def _told(point: Point, name: str, lines: Sequence[str]) -> str:
    time = f"time a token {tell(point.y, 'seconds')}"
    if point.least is not None:
        time += f", from {tell(point.least, 'seconds')} to {tell(point.largest, 'seconds')}"
    return hover_text(
        point.job,
        name,
        f"budget {tell(point.x, 'bytes')}",
        time,
        *lines,
        EARLIER * point.cached,
        CONTENDED * point.contended,
    )


def _hollow(points: Sequence[Point]) -> str:
    return f" A hollow mark was {EARLIER}." * any(point.cached for point in points)


def _caption(series: Sequence[Series], jobs: Sequence[Job]) -> str:
    """Return what the caption of ``series`` of ``jobs`` must say of how they were measured, and of what isn't drawn."""
    measured = [point for entry in series for point in entry.measured]
    text = ""
    if any(point.least is not None for point in measured):
        text += " A mark is the median of a job's repeats, its bar reaches from the least to the largest of them."
    text += _hollow(measured) + f" A cross: {CONTENDED}." * any(point.contended for point in measured)
    if beat := faster_than_storage(jobs):
        text += (
            f" A token of {listed(beat)} took less time than the storage needs for its bytes: they came from the"
            " system's page cache, or from a cache of the disk or of the host of this machine, unless the storage had"
            " others to serve when its rate was measured."
        )
    absent = [name for name in _MEANINGS if not any(getattr(entry, name) for entry in series)]
    if "lower_bound" not in absent:
        text += " Below the lower bound nothing can be but what was in a cache."
    lacking = " and ".join(_LACKING[name] for name in absent)
    return text + f" Not drawn, since the records don't hold it: {lacking}." * bool(absent)


def faster_than_storage(jobs: Sequence[Job]) -> tuple[str, ...]:
    """Return the names of the jobs whose tokens were clearly faster than their bytes can come from storage."""
    return tuple(
        job.name
        for job in jobs
        if (seconds := job.run.metric(SECONDS)) is not None
        and (bound := job.run.metric(LOWER_BOUND_SECONDS)) is not None
        and job.run.metrics.get(PREDICTED_BOTTLENECK) in (None, STORAGE)
        and seconds < _CLEARLY * bound
    )
