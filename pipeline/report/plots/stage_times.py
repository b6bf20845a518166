"""How long each stage took, job by job; a stage that came from the cache is hatched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from offstage.pipeline.report.figures import (
    COLOURS,
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
from offstage.pipeline.report.quantities import Scale, scale_for
from offstage.pipeline.report.records import StageTime
from offstage.pipeline.report.run_folders import Job

_FILL = 0.94
"""How much of its column a cell takes."""
_HATCHED = 0.4
"""How much of its column a cached cell's hatching takes at least."""


def stage_picture(jobs: Sequence[Job], labels: Mapping[str, str], *, most: int) -> Picture | None:
    """Return the stages' seconds as a bar in each cell, None where no job ended a stage."""
    begun = [job for job in jobs if job.run.stages]
    rows = begun[:most]
    if not rows:
        return None
    scale = scale_for([stage.seconds for job in rows for stage in job.run.stages], "seconds")
    caption = f"In {scale.unit}, all bars on one scale. What comes from the cache may still have to be loaded."
    caption += told_first(len(rows), len(begun))
    return picture(
        "stages",
        lambda figure, size: _paint(figure, size, rows, labels, scale),
        title="Time by stage",
        caption=caption,
        keys=[Key("bar", "fill", "seconds"), Key("rest", "hatched", "from the cache")],
        height=lambda size: 50 + row_height(size) * len(rows),
    )


def _paint(figure: Figure, size: Size, rows: Sequence[Job], labels: Mapping[str, str], scale: Scale) -> None:
    axes = figure.subplots()
    dress(axes)
    names = list(dict.fromkeys(stage.name for job in rows for stage in job.run.stages))
    longest = max((stage.seconds or 0 for job in rows for stage in job.run.stages), default=0) or 1
    name_rows(axes, row_names(rows, labels), size=size)
    axes.set_xlim(0, len(names))
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.xaxis.tick_top()
    words = [name.replace("_", "\n", 1) if size.narrow else name for name in names]
    axes.set_xticks([place + _FILL for place in range(len(names))], words, ha="right", color=COLOURS["muted"])
    for row, job in enumerate(rows):
        for stage in job.run.stages:
            _cell(
                axes,
                (names.index(stage.name), row),
                stage,
                share=(stage.seconds or 0) / longest,
                scale=scale,
                size=size,
            )


def _cell(axes: Axes, place: tuple[int, int], stage: StageTime, *, share: float, scale: Scale, size: Size) -> None:
    (column, row), (offset, height) = place, bar_place(size)
    middle = row + offset
    axes.barh(middle, _FILL, height, left=column, color=COLOURS["band"], linewidth=0)
    axes.barh(middle, _FILL * share, height, left=column, color=COLOURS["bar"], linewidth=0)
    if stage.cached:  # beside the number, not across it
        rim = COLOURS["rest"]
        axes.barh(
            middle,
            max(_HATCHED, _FILL * share),
            height,
            left=column,
            facecolor="none",
            edgecolor=rim,
            hatch="///",
            linewidth=0,
        )
    text = scale.number(stage.seconds)
    axes.text(column + _FILL - 0.04, middle, text, ha="right", va="center_baseline", color=COLOURS["ink"])
