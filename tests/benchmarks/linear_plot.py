"""The picture of the line: seconds a token against streamed bytes a token, in the report's look."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes

from tests.benchmarks.plot_style import COLOURS, dress, in_unit, measure_linear, picture

if TYPE_CHECKING:
    from tests.benchmarks.linear import Line, Point


def draw(points: Sequence[Point], line: Line, path: Path) -> None:
    """Draw ``points`` and the ``line`` through them into the PNG ``path``."""
    with picture(path) as figure:
        _paint(figure.subplots(), points, line)


def _paint(axes: Axes, points: Sequence[Point], line: Line) -> None:
    streamed, seconds = [point.streamed for point in points], [point.seconds for point in points]
    unit = measure_linear(axes, "x", streamed, "bytes")
    time_unit = measure_linear(axes, "y", seconds, "seconds")
    dress(axes, x_label=in_unit("streamed a token", unit), y_label=in_unit("time a token", time_unit))
    ends = [0.0, max(streamed)]
    axes.plot(ends, [line.start + line.slope * x for x in ends], "--", color=COLOURS["s0"], linewidth=1.6)
    axes.plot(
        streamed, seconds, "o", color=COLOURS["s0"], markersize=9, markerfacecolor=COLOURS["page"],
        markeredgewidth=2, clip_on=False, zorder=3,
    )  # fmt: skip
    for point in points:
        place = (point.streamed, point.seconds)
        axes.annotate(point.size, place, xytext=(0, 10), textcoords="offset points", ha="center", color=COLOURS["ink"])
    text = f"least squares: {1 / line.slope / 1e9:.2f} GB/s, R² = {line.r_squared:.4f}"
    axes.text(0.99, 0.04, text, transform=axes.transAxes, ha="right", color=COLOURS["muted"])
