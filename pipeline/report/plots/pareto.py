"""Memory against speed, and the jobs that no other beats in both."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from offstage.pipeline.report.figures import COLOURS, Key, Picture, Size, dress, in_unit, measure, picture
from offstage.pipeline.report.plots.series import HOLLOW, marks
from offstage.pipeline.report.speed import Front, Point

MOST_NAMES = 12


def pareto_picture(front: Front) -> Picture | None:
    """Return the plot of ``front``, None where no job has both a peak and a speed."""
    if not front.points:
        return None
    return picture(
        "pareto",
        lambda figure, size: _paint(figure, size, front),
        title="Memory against speed",
        caption="Upwards is faster, leftwards takes less memory: the measured peak of all devices, on the host the "
        "process itself too. No job beats one on the front in both.",
        keys=[
            Key("s0", "full-o", "on the front"),
            *[Key("muted", "mark-o", HOLLOW)] * any(point.cached for point in front.points),
            Key("rest", "full-o", "beaten by another job"),
        ],
        height=lambda size: 300 if size.narrow else 400,
    )


def _paint(figure: Figure, size: Size, front: Front) -> None:
    axes = figure.subplots()
    unit = _memory_axis(axes, [point.x for point in front.points], size)
    scale = measure(axes, "y", [point.y for point in front.points], "rate", size=size)
    dress(axes, x_label=in_unit("measured peak", unit), y_label=in_unit("tokens a second", scale))
    best = {(point.x, point.y) for point in front.best}
    beaten = [point for point in front.points if (point.x, point.y) not in best]
    marks(axes, beaten, "o", colour=COLOURS["rest"], size=5)
    x, y = [point.x for point in front.best], [point.y for point in front.best]
    axes.step(x, y, where="post", color=COLOURS["s0"], linewidth=1.4)
    marks(axes, front.best, "o", colour=COLOURS["s0"], size=9)
    _name(axes, front.best)


def _memory_axis(axes: Axes, values: Sequence[float], size: Size) -> str:
    """Scale the axis of memory, and return what its label must say of it.

    Peaks that lie close together would all stand on one spot of an axis from zero.
    """
    unit = measure(axes, "x", values, "bytes", size=size)
    low, high = min(values), max(values)
    if low > high / 2:
        margin = (high - low) * 0.08 or high * 0.01
        axes.set_xlim(low - margin, high + 3 * margin)
        return f"{unit}, not from zero"
    return unit


def _name(axes: Axes, best: Sequence[Point]) -> None:
    """Write the names beside the points of the front, the jobs of equal ones together."""
    names: dict[tuple[float, float], list[str]] = {}
    for point in best:
        names.setdefault((point.x, point.y), []).append(point.job)
    for (x, y), jobs in list(names.items())[:MOST_NAMES]:
        more = f" +{len(jobs) - 2}" if len(jobs) > 2 else ""
        text = ", ".join(jobs[:2]) + more
        axes.annotate(text, (x, y), (9, -5), textcoords="offset points", color=COLOURS["ink"], va="top")
