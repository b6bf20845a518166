"""The picture of lockstep: tokens a second against prompts together, batches beside it, and where it flattens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes

from tests.benchmarks.plot_style import COLOURS, dress, in_unit, measure_counts, measure_linear, picture

if TYPE_CHECKING:
    from tests.benchmarks.lockstep import GroupResult

NAMES = {"offstage": "offstage in lockstep", "accelerate": "transformers + accelerate, a batch"}


def draw(group_results: Sequence[GroupResult], path: Path) -> None:
    """Draw the ``group_results`` into the PNG ``path``."""
    with picture(path) as figure:
        axes = figure.subplots()
        _scale(axes, group_results)
        for number, (tool, name) in enumerate(NAMES.items()):
            groups = sorted((group for group in group_results if group.tool == tool), key=lambda group: group.size)
            if groups:
                _paint_tool(axes, groups, name, colour=COLOURS[f"s{number}"])
        _paint_bends(axes, group_results)
        axes.legend(frameon=False, labelcolor=COLOURS["ink"], loc="upper left")


def _scale(axes: Axes, group_results: Sequence[GroupResult]) -> None:
    """Scale the axes: from one group to the next twice as many prompts are the same way."""
    rates = [1 / min(group.seconds) for group in group_results]
    rates += [1 / group.predicted for group in group_results if group.predicted]
    measure_linear(axes, "y", rates, "rate")
    scale = measure_counts(axes, [group.size for group in group_results])
    dress(axes, x_label=in_unit("prompts together", scale), y_label="tokens a second, of all prompts")


def _paint_tool(axes: Axes, groups: Sequence[GroupResult], name: str, *, colour: str) -> None:
    """Draw the medians of a tool with bars from the least to the largest round, and what was predicted of it."""
    sizes, rates = [group.size for group in groups], [1 / group.median for group in groups]
    axes.plot(
        sizes, rates, "o-", color=colour, linewidth=1.6, markersize=9, markerfacecolor=COLOURS["page"],
        markeredgewidth=2, clip_on=False, zorder=3, label=name,
    )  # fmt: skip
    for group in groups:
        if len(group.seconds) > 1:
            ends = [1 / max(group.seconds), 1 / min(group.seconds)]
            axes.plot([group.size] * 2, ends, "_-", color=colour, linewidth=1.6, markersize=9, zorder=2)
    planned = [(group.size, 1 / group.predicted) for group in groups if group.predicted]
    if planned:
        axes.plot(*zip(*planned, strict=True), "--", color=colour, linewidth=1.4, label="as predicted")
    for group, rate in zip(groups, rates, strict=True):
        count = len(group.side["answers"])
        if group.same < count:
            axes.annotate(
                f"as alone: {group.same} of {count}", (group.size, rate), (-12, 5), textcoords="offset points",
                ha="right", color=COLOURS["muted"],
            )  # fmt: skip


def _paint_bends(axes: Axes, group_results: Sequence[GroupResult]) -> None:
    """Draw from where on more prompts bring nothing, as predicted and as measured."""
    from tests.benchmarks.lockstep import bends

    for place, style, word, level in zip(
        bends(group_results), ("--", "-"), ("predicted", "measured"), (0.02, 0.08), strict=True
    ):
        if place is not None:
            axes.axvline(place, color=COLOURS["muted"], linestyle=style, linewidth=1.2, zorder=1)
            axes.annotate(
                f"{word} bend: {place:.1f}", (place, level), (6, 0), xycoords=axes.get_xaxis_transform(),
                textcoords="offset points", color=COLOURS["muted"],
            )  # fmt: skip
