"""Series of jobs as lines and marks: measured, predicted, and the bound that moving the weights sets."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from offstage.pipeline.report.figures import COLOURS, SERIES, Key, Size
from offstage.pipeline.report.quantities import listed
from offstage.pipeline.report.run_folders import Job
from offstage.pipeline.report.speed import OTHERS, PREDICTED_BOUND, SECONDS, Point, Series, bound_seconds, drawn_series

_CROWD = 90
"""Past this many points, marks and lines are small."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_LINES = {"measured": "-", "predicted": "--", "bound": ":"}
HOLLOW = "hollow: measured by an earlier run, and served from the cache"
BUSY = "crossed out: others used the processor meanwhile"
CACHED_READS, STORAGE = "cached reads", "storage"
_LEVEL = 0.03
"""How much of the axis the level of a single point takes."""
_NEAR_END = 0.75
"""Beyond this part of the axis words stand to the left of their mark."""
MOST_WORDS = 24
"""So many marks have words beside them; the caption has all of their jobs."""
_MEANINGS = {
    "predicted": ("dashed", "predicted by the plan"),
    "bound": ("dotted", "bound: bytes moved ÷ their bandwidth; below it nothing can be, but what was in a cache"),
}
_CLEARLY = 0.95
"""A job beats its bound with less than this share of the seconds: rates aren't known to the percent."""

_LACKING = {"predicted": "the prediction", "bound": "the storage's bandwidth, for the bound"}


def series_caption(series: Sequence[Series], jobs: Sequence[Job]) -> str:
    """Return what the caption of ``series`` of ``jobs`` must say of how they were measured, and of what isn't drawn."""
    told = ""
    if any(point.least is not None for entry in series for point in entry.measured):
        told += " A mark is the median of a job's samples, its bar reaches from the least to the largest of them."
    if beat := faster_than_storage(jobs):
        told += (
            f" “{CACHED_READS}” stands where a token took less time than the storage needs for its bytes"
            f" ({listed(beat)}): they came from the system's page cache, or from a cache of the disk or of the host of"
            " this machine, unless the storage had others to serve when its rate was measured."
        )
    count, drawn = (sum(len(entry.measured) for entry in one) for one in (series, drawn_series(series)))
    if drawn < count:
        told += f" Of {count:,} jobs {drawn:,} are drawn, the fastest and the slowest of each stretch."
    absent = _absent(series)
    lacking = " and ".join(_LACKING[name] for name in absent)
    return told + f" Not drawn, since the records don't hold it: {lacking}." * bool(absent)


def _absent(series: Sequence[Series]) -> list[str]:
    return [name for name in _MEANINGS if not any(getattr(entry, name) for entry in series)]


def faster_than_storage(jobs: Sequence[Job]) -> tuple[str, ...]:
    """Return the names of the jobs whose tokens were clearly faster than their bytes can come from storage."""
    return tuple(
        job.name
        for job in jobs
        if (seconds := job.run.metric(SECONDS)) is not None
        and (bound := bound_seconds(job.run)) is not None
        and job.run.words.get(PREDICTED_BOUND, STORAGE) == STORAGE
        and seconds < _CLEARLY * bound
    )


def series_keys(series: Sequence[Series]) -> list[Key]:
    """Return the legend of ``series``."""
    settings = [
        Key(_colour(index, entry), f"full-{MARKERS[index]}", entry.name or "measured")
        for index, entry in enumerate(series)
    ]
    if any(point.cached for entry in series for point in entry.measured):
        settings.append(Key("muted", "mark-o", HOLLOW))
    if any(point.busy for entry in series for point in entry.measured):
        settings.append(Key("ink", "mark-x", BUSY))
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
    measured = [point for entry in series for point in entry.measured]
    _crosses(axes, measured, size=5 if crowded else 9)
    _words(axes, measured, frozenset(faster_than_storage(jobs)))


def _line(axes: Axes, points: Sequence[Point], style: str, *, colour: str, width: float, depth: float) -> None:
    """Draw a line through ``points``; a single one that isn't measured, and has no mark, is a level of its own."""
    x, y = [point.x for point in points], [point.y for point in points]
    if len(points) == 1 and style != _LINES["measured"]:
        middle = _along(axes, points[0])
        across, y = [middle - _LEVEL / 2, middle + _LEVEL / 2], [y[0], y[0]]
        level = axes.get_yaxis_transform()
        axes.plot(across, y, style, color=colour, linewidth=width, zorder=depth, transform=level, clip_on=False)
        return
    axes.plot(x, y, style, color=colour, linewidth=width, zorder=depth)


def _along(axes: Axes, point: Point) -> float:
    """Return how far along the x axis ``point`` stands: 0 at its beginning, 1 at its end."""
    place = axes.transAxes.inverted().transform(axes.transData.transform((point.x, point.y)))
    return float(place[0])


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


def _crosses(axes: Axes, points: Sequence[Point], *, size: float) -> None:
    """Cross out the marks of jobs that were disturbed."""
    busy = [point for point in points if point.busy]
    axes.scatter(
        [point.x for point in busy], [point.y for point in busy], size**2, marker="x", color=COLOURS["ink"],
        linewidths=1.4, clip_on=False, zorder=4, urls=[point.link or None for point in busy],
    )  # fmt: skip


def _words(axes: Axes, points: Sequence[Point], cached_reads: frozenset[str]) -> None:
    """Say beside the marks of jobs that beat their storage what that is."""
    for point in [point for point in points if point.job in cached_reads][:MOST_WORDS]:
        at_end = _along(axes, point) > _NEAR_END
        axes.annotate(
            CACHED_READS, (point.x, point.y), (-10, 5) if at_end else (10, 2), textcoords="offset points",
            ha="right" if at_end else "left", color=COLOURS["muted"],
        )  # fmt: skip
