"""How often a mixture's experts were found in slots: one row a job, one cell a layer, filled as far as they were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from offstage.pipeline.report.figures import (
    COLOURS,
    EARLIER,
    Key,
    Picture,
    Size,
    bar_place,
    dress,
    name_rows,
    picture,
    row_height,
    row_names,
    told_first,
)
from offstage.pipeline.report.records import Number
from offstage.pipeline.report.run_folders import Job

_FILL = 0.9
"""How much of its column a cell takes."""


def expert_picture(jobs: Sequence[Job], labels: Mapping[str, str], *, most: int) -> Picture | None:
    """Return the layers' rates of hits as a bar in each cell, None where no job had experts that wait."""
    mixtures = [job for job in jobs if job.run.experts]
    rows = mixtures[:most]
    if not rows:
        return None
    layers = list(rows[0].run.experts)
    caption = "One cell a layer with experts that wait, filled by how often one was found in a slot in the whole run:"
    caption += f" from {layers[0]} to {layers[-1]}."
    caption += told_first(len(rows), len(mixtures))
    return picture(
        "experts",
        lambda figure, size: _paint(figure, size, rows, labels),
        title="Experts found in slots",
        caption=caption,
        keys=[
            Key("bar", "fill", "found in a slot"),
            Key("band", "fill", "brought"),
            *[Key("bar", "outline", EARLIER)] * any(job.run.provenance.is_cached for job in rows),
        ],
        height=lambda size: 70 + row_height(size) * len(rows),
    )


def hit_share(use: Mapping[str, Number | None]) -> float | None:
    """Return which share of a layer's calls found their expert in a slot, None where there were none, or no counts."""
    hits, misses = use.get("hits"), use.get("misses")
    if hits is None or misses is None or hits < 0 or misses < 0 or not hits + misses:
        return None
    return hits / (hits + misses)


def _paint(figure: Figure, size: Size, rows: Sequence[Job], labels: Mapping[str, str]) -> None:
    axes = figure.subplots()
    dress(axes, x_label="layer with experts")
    name_rows(axes, row_names(rows, labels), size=size)
    axes.set_xlim(0, max(len(job.run.experts) for job in rows))
    axes.xaxis.set_major_locator(MaxNLocator(5 if size.narrow else 10, integer=True))
    axes.grid(visible=False)
    for row, job in enumerate(rows):
        shares = [hit_share(use) for use in job.run.experts.values()]
        _cells(axes, row, shares, size=size, hollow=job.run.provenance.is_cached)


def _cells(axes: Axes, row: int, shares: Sequence[float | None], *, size: Size, hollow: bool) -> None:
    """Draw the cells of a row from their lower edge up, ``hollow`` ones as outlines; a layer without calls has none."""
    offset, height = bar_place(size)
    known = [(place + 0.5, share) for place, share in enumerate(shares) if share is not None]
    middles, low = [middle for middle, _ in known], row + offset + height / 2
    axes.bar(middles, [-height] * len(known), _FILL, low, color=COLOURS["band"], linewidth=0)
    face, edge = ("band", 1.6) if hollow else ("bar", 0)
    axes.bar(
        middles, [-height * share for _, share in known], _FILL, low, facecolor=COLOURS[face],
        edgecolor=COLOURS["bar"], linewidth=edge,
    )  # fmt: skip
