"""The picture of activations offloaded by ratio: peaks and seconds against the ratio, the other sides as levels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes

from offstage.pipeline.metrics import Unit
from tests.benchmarks.plot_style import COLOURS, dress, in_unit, measure_linear, picture

if TYPE_CHECKING:
    from tests.benchmarks.activation_sides import SideRun
    from tests.benchmarks.activations import PlaceResult

Figures = Callable[["SideRun"], float]
WORDS = {"disk": "cpu, spilled to disk", "simulated": "simulated accelerator", "cuda": "accelerator"}
LEVELS = {"none": ("plain step", "--", 0.28), "save_on_cpu": ("save_on_cpu", ":", 0.66)}
"""Sides without a ratio: what they are called, their line, and where along it the name stands."""


def draw(results: Sequence[PlaceResult], path: Path) -> None:
    """Draw ``results`` of one or more places into the PNG ``path``; times of a simulated accelerator are left out."""
    timed = [result for result in results if result.place != "simulated"]
    with picture(path) as figure:
        panels = figure.subplots(1, len(results) + len(timed), squeeze=False)[0]
        for axes, result in zip(panels, results, strict=False):
            _paint(axes, result, lambda side: side.peak, kind="bytes", label=f"peak, {WORDS[result.place]}")
        for axes, result in zip(panels[len(results) :], timed, strict=True):
            label = f"time an iteration, {WORDS[result.place]}"
            _paint(axes, result, lambda side: side.seconds, kind="seconds", label=label)


def _paint(axes: Axes, result: PlaceResult, figure_of: Figures, *, kind: Unit, label: str) -> None:
    """Draw ours against the ratio, and a level for each side that has none."""
    unit = measure_linear(axes, "y", [figure_of(side) for side in result.sides], kind)
    axes.set_xlim(0, 1)
    dress(axes, x_label="ratio offloaded", y_label=in_unit(label, unit))
    points = [(float(side.side), figure_of(side)) for side in result.sides if side.side not in LEVELS]
    if points:
        axes.plot(
            *zip(*points, strict=True), "o-", color=COLOURS["s0"], linewidth=1.6, markersize=9,
            markerfacecolor=COLOURS["page"], markeredgewidth=2, clip_on=False, zorder=3,
        )  # fmt: skip
    for side in result.sides:
        if side.side in LEVELS:
            name, line, along = LEVELS[side.side]
            axes.axhline(figure_of(side), color=COLOURS["s1"], linestyle=line, linewidth=1.6)
            axes.annotate(
                name, (along, figure_of(side)), xytext=(0, 4), textcoords="offset points", ha="center",
                color=COLOURS["ink"],
            )  # fmt: skip
