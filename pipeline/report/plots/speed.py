"""Budget against seconds a token: measured, predicted, and the bound that moving the weights sets."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline.report.figures import COLOURS, SERIES, Key, Picture, Size, dress, in_unit, measure, picture
from pipeline.report.speed import OTHERS, Point, Series

_CROWD = 90
"""Past this many points, marks and lines are small."""
MARKERS = ("o", "s", "^", "D", "v", "P", "x")
_LINES = {"measured": "-", "predicted": "--", "bound": ":"}
EARLIER = "hollow: measured by an earlier run, and served from the cache"
MOST_BUSY = 24
"""So many jobs that were disturbed are named in the plot; the table has them all."""
_MEANINGS = {
    "predicted": ("dashed", "predicted by the plan"),
    "bound": ("dotted", "bound: bytes moved ÷ their bandwidth"),
}

_LACKING = {"predicted": "the prediction", "bound": "the storage's bandwidth, for the bound"}


def speed_picture(series: Sequence[Series]) -> Picture | None:
    """Return the plot of ``series``, None where no job has both a budget and a speed."""
    if not series:
        return None
    absent = [name for name in _MEANINGS if not any(getattr(entry, name) for entry in series)]
    lacking = " and ".join(_LACKING[name] for name in absent)
    caption = "Each mark is a job. The budget is that of all devices but the disk, in bytes of weights."
    caption += measured_caption([point for entry in series for point in entry.measured])
    if absent:
        caption += f" Not drawn, since the records don't hold it: {lacking}."
    return picture(
        "speed",
        lambda figure, size: _paint(figure, size, series),
        title="Budget against seconds a token",
        caption=caption,
        keys=_keys(series, absent),
        height=lambda size: 300 if size.narrow else 400,
    )


def measured_caption(points: Sequence[Point]) -> str:
    """Return what a caption must say of how ``points`` were measured, empty where each is a sample of its own."""
    told = ""
    if any(point.least is not None for point in points):
        told += " A mark is the median of a job's samples, its bar reaches from the least to the largest of them."
    if any(point.busy for point in points):
        told += " “busy” stands where others used the processor meanwhile."
    return told


def _keys(series: Sequence[Series], absent: Sequence[str]) -> list[Key]:
    settings = [
        Key(_colour(index, entry), f"full-{MARKERS[index]}", entry.name or "measured")
        for index, entry in enumerate(series)
    ]
    if any(point.cached for entry in series for point in entry.measured):
        settings.append(Key("muted", "mark-o", EARLIER))
    return settings + [Key("muted", mark, text) for name, (mark, text) in _MEANINGS.items() if name not in absent]


def _colour(index: int, entry: Series) -> str:
    return "rest" if entry.name == OTHERS else SERIES[index]


def _paint(figure: Figure, size: Size, series: Sequence[Series]) -> None:
    """Draw every series. Earlier ones have wider lines and rings, so that equal points of two series both show."""
    axes = figure.subplots()
    points = [point for entry in series for name in _LINES for point in getattr(entry, name)]
    unit = measure(axes, "x", [point.x for point in points], "bytes", size=size)
    reached = [end for point in points for end in (point.least, point.y, point.largest) if end is not None]
    time_unit = measure(axes, "y", reached, "seconds", size=size)
    dress(
        axes,
        x_label=in_unit("budget", unit),
        y_label=in_unit("time a token", time_unit),
    )
    crowded = len(points) > _CROWD
    for index, entry in enumerate(series):
        colour, width = COLOURS[_colour(index, entry)], 1.0 if crowded else max(1.4, 3.4 - index)
        depth = 1 if entry.name == OTHERS else 2
        for name, style in _LINES.items():
            _line(axes, getattr(entry, name), style, colour=colour, width=width, depth=depth)
        ring = 5.0 if crowded else max(4, (11 if size.narrow else 13) - 4 * index)
        _marks(axes, entry.measured, MARKERS[index], colour=colour, ring=ring, depth=depth)


def _line(axes: Axes, points: Sequence[Point], style: str, *, colour: str, width: float, depth: float) -> None:
    x, y = [point.x for point in points], [point.y for point in points]
    axes.plot(x, y, style, color=colour, linewidth=width, zorder=depth)


def _marks(axes: Axes, points: Sequence[Point], marker: str, *, colour: str, ring: float, depth: float) -> None:
    """Draw a mark a job, hollow where its figures are an earlier run's, with a bar from its least to largest sample."""
    for point in points:
        if point.least is not None and point.largest is not None:
            axes.errorbar(
                [point.x], [point.y], yerr=[[point.y - point.least], [point.largest - point.y]], fmt="none",
                ecolor=colour, elinewidth=1.4, capsize=ring / 2, capthick=1.4, zorder=depth,
            )  # fmt: skip
    for cached in (False, True):
        shown = [point for point in points if point.cached is cached]
        axes.plot(
            [point.x for point in shown], [point.y for point in shown], marker, color=colour, markersize=ring,
            markerfacecolor=COLOURS["page"] if cached else colour, markeredgewidth=2 if ring > 5 else 1.3,
            clip_on=False, zorder=depth + 0.5,
        )  # fmt: skip
    for point in [point for point in points if point.busy][:MOST_BUSY]:
        axes.annotate("busy", (point.x, point.y), (8, 2), textcoords="offset points", color=COLOURS["muted"])
