"""The picture of a repeated sweep: medians with their spread, the samples of each job, and what is within the noise."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

from matplotlib.lines import Line2D

from offstage.pipeline.report.checkpoint_groups import CheckpointGroup
from offstage.pipeline.report.figures import COLOURS, SERIES, WIDE, name_rows, row_names
from offstage.pipeline.report.plots.samples import DECODING, paint_samples
from offstage.pipeline.report.plots.series import MARKERS
from offstage.pipeline.report.plots.speed import paint_speed
from tests.benchmarks.linear_plot import picture

HEIGHT, PER_LINE, LINE = 470, 150, 17


def draw(group: CheckpointGroup, path: Path) -> None:
    """Draw the jobs of ``group`` into the PNG ``path``."""
    from tests.benchmarks.repeated import told

    lines = [line for sentence in told(group)[:2] for line in textwrap.wrap(sentence, PER_LINE)]
    rows = [job for job in group.jobs if len(job.run.counting) > 1]
    with picture(path, height=HEIGHT + LINE * len(lines)) as figure:
        left, right = figure.subplots(1, 2)
        paint_speed(left, group.series, group.jobs, size=WIDE)
        title, value = DECODING
        paint_samples(right, rows, value, title=title, size=WIDE)
        name_rows(right, row_names(rows, group.labels), size=WIDE)
        figure.legend(
            handles=list(_handles(group)), frameon=False, labelcolor=COLOURS["ink"], loc="outside upper left", ncols=6
        )
        figure.supxlabel("\n".join(lines), x=0.01, ha="left", color=COLOURS["ink"], fontsize=WIDE.text)


def _handles(group: CheckpointGroup) -> Iterator[Line2D]:
    """Yield what the legend has: the settings, lines that aren't measured, and marks that say how one was."""
    muted, points = COLOURS["muted"], [point for entry in group.series for point in entry.measured]
    for index, entry in enumerate(group.series):
        yield Line2D([], [], color=COLOURS[SERIES[index]], marker=MARKERS[index], label=entry.name or "measured")
    for name, style in (("predicted", "--"), ("bound", ":")):
        if any(getattr(entry, name) for entry in group.series):
            yield Line2D([], [], color=muted, linestyle=style, label=name)
    if any(point.busy for point in points):
        yield Line2D([], [], color=COLOURS["ink"], marker="x", linestyle="", label="others used the processor")
    if any(point.cached for point in points):
        yield Line2D([], [], color=muted, marker="o", markerfacecolor=COLOURS["page"], linestyle="", label="cached")
