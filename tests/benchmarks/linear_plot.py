"""The picture of the line: seconds a token against streamed bytes a token, in the report's look."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from offstage.pipeline.report.figures import COLOURS, WIDE, dress, in_unit, measure_linear

if TYPE_CHECKING:
    from tests.benchmarks.linear import Line, Point

HEIGHT, PER_INCH, SHARPNESS = 420, 72, 2


def draw(points: Sequence[Point], line: Line, path: Path) -> None:
    """Draw ``points`` and the ``line`` through them into the PNG ``path``."""
    with picture(path) as figure:
        _paint(figure.subplots(), points, line)


@contextmanager
def picture(path: Path, *, height: float = HEIGHT) -> Iterator[Figure]:
    """Lend a figure in the report's look, of so many pixels, which is then saved as the PNG ``path``."""
    COLOURS.update(_page_colours())  # a PNG has no page behind it that could say what the colours are
    with matplotlib.rc_context({"font.size": WIDE.text, "axes.unicode_minus": False}):
        size = (WIDE.width / PER_INCH, height / PER_INCH)
        figure = Figure(figsize=size, dpi=PER_INCH * SHARPNESS, layout="constrained", facecolor=COLOURS["page"])
        FigureCanvasAgg(figure)
        yield figure
        figure.savefig(path, format="png", metadata={"Software": None})


def _page_colours() -> dict[str, str]:
    """Return the report's colours by name, those of its light scheme."""
    style = resources.files("offstage.pipeline.report").joinpath("templates", "style.css").read_text(encoding="utf-8")
    return dict(re.findall(r"--([\w-]+): (#\w+);", style.split("@media")[0]))


def _paint(axes: Axes, points: Sequence[Point], line: Line) -> None:
    streamed, seconds = [point.streamed for point in points], [point.seconds for point in points]
    unit = measure_linear(axes, "x", streamed, "bytes", size=WIDE)
    time_unit = measure_linear(axes, "y", seconds, "seconds", size=WIDE)
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
