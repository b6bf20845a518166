"""The picture of a mixture under caps: seconds a token, and the share of experts that were kept when wanted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from tests.benchmarks.plot_style import COLOURS, dress, in_unit, measure_linear, picture

if TYPE_CHECKING:
    from tests.benchmarks.mixture import CapResult

Line = Sequence[float | None]


def draw(results: Sequence[CapResult], path: Path) -> None:
    """Draw ``results`` under several caps into the PNG ``path``."""
    ordered = sorted(results, key=lambda result: result.cap)
    caps = [float(result.cap) for result in ordered]
    others = {tool: [result.others[tool] for result in ordered] for tool in ordered[0].others}
    with picture(path) as figure:
        left, right = figure.subplots(1, 2)
        _paint_seconds(left, caps, {"offstage": [result.seconds for result in ordered], **others})
        _paint_hits(right, caps, [result.hit_rate for result in ordered])


def _paint_seconds(axes: Axes, caps: Sequence[float], lines: dict[str, Line]) -> None:
    """Draw the seconds a token of each tool."""
    cap_unit = measure_linear(axes, "x", caps, "bytes")
    every = [value for line in lines.values() for value in line if value is not None]
    unit = measure_linear(axes, "y", every, "seconds")
    dress(axes, x_label=in_unit("hard cap on memory", cap_unit), y_label=in_unit("time a token", unit))
    for number, (name, line) in enumerate(lines.items()):
        _paint_line(axes, caps, line, colour=COLOURS[f"s{number}"], name=name)


def _paint_hits(axes: Axes, caps: Sequence[float], rates: Line) -> None:
    """Draw the share of the wanted experts that were in a slot."""
    cap_unit = measure_linear(axes, "x", caps, "bytes")
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    dress(axes, x_label=in_unit("hard cap on memory", cap_unit), y_label="experts that were kept when wanted")
    _paint_line(axes, caps, rates, colour=COLOURS["s0"], name="")


def _paint_line(axes: Axes, caps: Sequence[float], values: Line, *, colour: str, name: str) -> None:
    """Draw a line through those of ``values`` that are there, and name it where it begins."""
    points = [(cap, value) for cap, value in zip(caps, values, strict=True) if value is not None]
    if points:
        axes.plot(
            *zip(*points, strict=True), "o-", color=colour, linewidth=1.6, markersize=9,
            markerfacecolor=COLOURS["page"], markeredgewidth=2, clip_on=False, zorder=3,
        )  # fmt: skip
        axes.annotate(name, points[0], xytext=(0, 10), textcoords="offset points", ha="left", color=COLOURS["ink"])
