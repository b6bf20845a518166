"""Series of jobs as lines and marks: measured, predicted, and the bound that moving the weights sets."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from pipeline.report.figures import COLOURS, SERIES, Key, Size
from pipeline.report.run_folders import Job
from pipeline.report.speed import OTHERS, PREDICTED_BOUND, SECONDS, Point, Series, bound_seconds

_CROWD = 90
"""Past this many points, marks and lines are small."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_LINES = {"measured": "-", "predicted": "--", "bound": ":"}
HOLLOW = "hollow: measured by an earlier run, and served from the cache"
BUSY, CACHED_READS, STORAGE = "busy", "cached reads", "storage"
_NEAR_END = 0.75
"""Beyond this part of the axis words stand to the left of their mark."""
MOST_WORDS = 24
"""So many marks have words beside them that say what was odd; the table has all jobs."""
_MEANINGS = {
    "predicted": ("dashed", "predicted by the plan"),
    "bound": ("dotted", "bound: bytes moved ÷ their bandwidth; below it nothing can be, but what was in a cache"),
}
_CLEARLY = 0.95
"""A job beats its bound with less than this share of the seconds: rates aren't known to the percent."""

_LACKING = {"predicted": "the prediction", "bound": "the storage's bandwidth, for the bound"}


def series_caption(series: Sequence[Series], jobs: Sequence[Job]) -> str:
    """Return what the caption of ``series`` of ``jobs`` must say of how they were measured, and of what isn't drawn."""
    told = _measured_caption([point for entry in series for point in entry.measured])
    if faster_than_storage(jobs):
        told += (
            f" “{CACHED_READS}” stands where a token took less time than the storage needs for its bytes: they came"
            " from the system's page cache, or from a cache of the disk or of the host of this machine."
        )
    absent = _absent(series)
    lacking = " and ".join(_LACKING[name] for name in absent)
    return told + f" Not drawn, since the records don't hold it: {lacking}." * bool(absent)


def _absent(series: Sequence[Series]) -> list[str]:
    return [name for name in _MEANINGS if not any(getattr(entry, name) for entry in series)]


def faster_than_storage(jobs: Sequence[Job]) -> frozenset[str]:
    """Return the names of the jobs whose tokens were clearly faster than their bytes can come from storage."""
    return frozenset(
        job.name
        for job in jobs
        if (seconds := job.run.metric(SECONDS)) is not None
        and (bound := bound_seconds(job.run)) is not None
        and job.run.words.get(PREDICTED_BOUND, STORAGE) == STORAGE
        and seconds < _CLEARLY * bound
    )


def _measured_caption(points: Sequence[Point]) -> str:
    """Return what a caption must say of how ``points`` were measured, empty where each is a sample of its own."""
    told = ""
    if any(point.least is not None for point in points):
        told += " A mark is the median of a job's samples, its bar reaches from the least to the largest of them."
    if any(point.busy for point in points):
        told += " “busy” stands where others used the processor meanwhile."
    return told


def series_keys(series: Sequence[Series]) -> list[Key]:
    """Return the legend of ``series``."""
    settings = [
        Key(_colour(index, entry), f"full-{MARKERS[index]}", entry.name or "measured")
        for index, entry in enumerate(series)
    ]
    if any(point.cached for entry in series for point in entry.measured):
        settings.append(Key("muted", "mark-o", HOLLOW))
    return settings + [
        Key("muted", mark, text) for name, (mark, text) in _MEANINGS.items() if name not in _absent(series)
    ]


def _colour(index: int, entry: Series) -> str:
    return "rest" if entry.name == OTHERS else SERIES[index]


def ends(series: Sequence[Series]) -> tuple[list[float], list[float]]:
    """Return all that the axes of ``series`` must have room for: across, and upwards."""
    points = [point for entry in series for name in _LINES for point in getattr(entry, name)]
    reached = [end for point in points for end in (point.least, point.y, point.largest) if end is not None]
    return [point.x for point in points], reached


def paint_series(axes: Axes, series: Sequence[Series], jobs: Sequence[Job], *, size: Size) -> None:
    """Draw every series on ``axes``, which have their scales.

    Earlier ones have wider lines and rings, so that equal points of two series both show.
    """
    crowded = len(ends(series)[0]) > _CROWD
    for index, entry in enumerate(series):
        colour, width = COLOURS[_colour(index, entry)], 1.0 if crowded else max(1.4, 3.4 - index)
        depth = 1 if entry.name == OTHERS else 2
        if entry.name != OTHERS:  # what isn't one setting has no line through it
            for name, style in _LINES.items():
                _line(axes, getattr(entry, name), style, colour=colour, width=width, depth=depth)
        ring = 5.0 if crowded else max(4, (11 if size.narrow else 13) - 4 * index)
        _marks(axes, entry.measured, MARKERS[index], colour=colour, ring=ring, depth=depth)
    bounds = [(entry.bound, COLOURS[_colour(index, entry)]) for index, entry in enumerate(series)]
    _shade(axes, [bound for entry, bound in zip(series, bounds, strict=True) if entry.name != OTHERS])
    _words(axes, [point for entry in series for point in entry.measured], faster_than_storage(jobs))


def _line(axes: Axes, points: Sequence[Point], style: str, *, colour: str, width: float, depth: float) -> None:
    """Draw a line through ``points``; a single one that isn't measured, and has no mark, is a line of its own."""
    x, y = [point.x for point in points], [point.y for point in points]
    if len(points) == 1 and style != _LINES["measured"]:
        axes.plot(
            [x[0]], y, marker="_", color=colour, markersize=26, markeredgewidth=width, zorder=depth,
            fillstyle="none",
        )  # fmt: skip
        return
    axes.plot(x, y, style, color=colour, linewidth=width, zorder=depth)


def _shade(axes: Axes, bounds: Sequence[tuple[Sequence[Point], str]]) -> None:
    """Shade what lies below each bound, down to the lower end of the axis, which stays where it is."""
    low, high = axes.get_ylim()
    for bound, colour in bounds:
        if len(bound) > 1:
            x, y = [point.x for point in bound], [point.y for point in bound]
            axes.fill_between(x, low, y, color=colour, alpha=0.07, linewidth=0, zorder=0.5)
    axes.set_ylim(low, high)


def _marks(axes: Axes, points: Sequence[Point], marker: str, *, colour: str, ring: float, depth: float) -> None:
    """Draw a mark a job, hollow where its figures are an earlier run's, with a bar from its least to largest sample."""
    for point in points:
        if point.least is not None and point.largest is not None:
            axes.errorbar(
                [point.x], [point.y], yerr=[[point.y - point.least], [point.largest - point.y]], fmt="none",
                ecolor=colour, elinewidth=1.4, capsize=ring / 2, capthick=1.4, zorder=depth,
            )  # fmt: skip
    marks(axes, points, marker, colour=colour, size=ring, edge=2 if ring > 5 else 1.3, depth=depth + 0.5)


def marks(
    axes: Axes, points: Sequence[Point], marker: str, *, colour: str, size: float, edge: float = 1.6, depth: float = 2.5
) -> None:
    """Draw a ``marker`` of ``size`` a job that links to it, hollow where its figures are an earlier run's."""
    faces = [COLOURS["page"] if point.cached else colour for point in points]
    axes.scatter(
        [point.x for point in points], [point.y for point in points], size**2, marker=marker, facecolors=faces,
        edgecolors=colour, linewidths=edge, clip_on=False, zorder=depth, urls=[point.link or None for point in points],
    )  # fmt: skip


def _words(axes: Axes, points: Sequence[Point], cached_reads: frozenset[str]) -> None:
    """Say beside a mark what was odd about its job."""
    odd = [(point, [BUSY] * point.busy + [CACHED_READS] * (point.job in cached_reads)) for point in points]
    for point, words in [(point, words) for point, words in odd if words][:MOST_WORDS]:
        text, along = ", ".join(words), axes.transData.transform((point.x, point.y))
        at_end = axes.transAxes.inverted().transform(along)[0] > _NEAR_END
        axes.annotate(
            text, (point.x, point.y), (-8, 4) if at_end else (8, 2), textcoords="offset points",
            ha="right" if at_end else "left", color=COLOURS["muted"],
        )  # fmt: skip
