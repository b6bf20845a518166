"""The picture of a repeated sweep: medians with their spread, the repeats of each job, and what is within the noise."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from offstage.pipeline.report.checkpoint_groups import CheckpointGroup
from offstage.pipeline.report.noise import token_times
from offstage.pipeline.report.quantities import shorten
from offstage.pipeline.report.run_folders import Job
from offstage.pipeline.report.speed import Point, Series
from tests.benchmarks.plot_style import COLOURS, TEXT, dress, in_unit, measure_linear, picture

HEIGHT, PER_LINE, LINE = 470, 150, 17
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def draw(group: CheckpointGroup, path: Path) -> None:
    """Draw the jobs of ``group`` into the PNG ``path``."""
    from tests.benchmarks.repeated import describe

    lines = [line for sentence in describe(group)[:2] for line in textwrap.wrap(sentence, PER_LINE)]
    rows = [job for job in group.jobs if len(job.run.counting) > 1]
    with picture(path, height=HEIGHT + LINE * len(lines)) as figure:
        left, right = figure.subplots(1, 2)
        _paint_series(left, group.series)
        _paint_repeats(right, rows, [shorten(group.labels[job.name], 40) for job in rows])
        figure.legend(frameon=False, labelcolor=COLOURS["ink"], loc="outside upper left", ncols=6)
        figure.supxlabel("\n".join(lines), x=0.01, ha="left", color=COLOURS["ink"], fontsize=TEXT)


def _paint_series(axes: Axes, series: Sequence[Series]) -> None:
    """Draw the seconds of a token against the budget: measured with their spread, predicted, and the bound."""
    lines = [(entry.measured, entry.predicted, entry.lower_bound) for entry in series]
    points = [point for entry in lines for line in entry for point in line]
    unit = measure_linear(axes, "x", [point.x for point in points], "bytes")
    time_unit = measure_linear(axes, "y", [point.largest or point.y for point in points], "seconds")
    dress(axes, x_label=in_unit("budget", unit), y_label=in_unit("time a token", time_unit))
    labelled: set[str] = set()
    for index, entry in enumerate(series):
        colour = COLOURS[f"s{index}" if index < 6 else "rest"]
        for line, style, name in ((entry.predicted, "--", "predicted"), (entry.lower_bound, ":", "bound")):
            if line:
                label = f"_{name}" if name in labelled else name
                axes.plot(*_places(line), style, color=colour, linewidth=1.6, label=label)
                labelled.add(name)
        axes.plot(*_places(entry.measured), "-", color=colour, linewidth=1.6)
        _paint_marks(axes, entry.measured, MARKERS[index], colour=colour, name=entry.name or "measured")
    contended = [point for line, *_ in lines for point in line if point.contended]
    if contended:
        axes.plot(*_places(contended), "x", color=COLOURS["ink"], markersize=9, label="others used the processor")


def _places(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [point.x for point in points], [point.y for point in points]


def _paint_marks(axes: Axes, points: Sequence[Point], marker: str, *, colour: str, name: str) -> None:
    """Draw a mark a job, hollow where an earlier run measured it, its bar from the least to the largest repeat."""
    for index, point in enumerate(points):
        ends = [[point.y - (point.least or point.y)], [(point.largest or point.y) - point.y]]
        axes.errorbar(
            [point.x], [point.y], yerr=ends, fmt=marker, color=colour, markersize=8, capsize=4, clip_on=False,
            markerfacecolor=COLOURS["page"] if point.cached else colour, label="_" * bool(index) + name,
        )  # fmt: skip


def _paint_repeats(axes: Axes, rows: Sequence[Job], names: Sequence[str]) -> None:
    """Draw the seconds of a token of each repeat, a box and a row each job."""
    times = [token_times(job) for job in rows]
    unit = measure_linear(axes, "x", [seconds for each in times for seconds in each], "seconds")
    dress(axes, x_label=in_unit("decoding: time a token", unit))
    axes.boxplot(
        times, positions=range(len(rows)), widths=0.6, orientation="horizontal", whis=(0, 100), showfliers=False,
        patch_artist=True, boxprops={"facecolor": COLOURS["bar"], "linewidth": 0},
        medianprops={"color": COLOURS["ink"]},
    )  # fmt: skip
    for row, each in enumerate(times):
        axes.plot(each, [row] * len(each), "o", color=COLOURS["s0"], markersize=4.5, clip_on=False)
    axes.set_yticks(range(len(rows)), names, color=COLOURS["ink"])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
