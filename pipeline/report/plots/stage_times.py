"""How long each stage took, job by job; a stage that came from the cache is hatched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from offstage.pipeline.report.figures import (
    SERIES,
    Picture,
    colour,
    figure,
    named,
    named_rows,
    scale,
    shown,
    told,
    told_first,
)
from offstage.pipeline.report.quantities import tell
from offstage.pipeline.report.run_folders import Job


def stage_picture(jobs: Sequence[Job], labels: Mapping[str, str], *, most: int) -> Picture | None:
    """Return the stages' seconds as a bar a job, None where no job ended a stage."""
    begun = [job for job in jobs if job.run.stages]
    rows = begun[:most]
    if not rows:
        return None
    names = list(dict.fromkeys(stage.name for job in rows for stage in job.run.stages))
    sums = [sum(stage.seconds or 0 for stage in job.run.stages) for job in rows]
    drawn = figure(
        [_bars(rows, name, (*SERIES, colour("rest"))[index % 7]) for index, name in enumerate(names)],
        rows=len(rows), barmode="stack", bargap=0.38, showlegend=True, yaxis=named_rows(rows, labels),
        xaxis=scale("time", "seconds", sums, linear=True),
    )  # fmt: skip
    caption = "One bar a job, one part a stage. What is hatched comes from the cache, and may still have to be loaded."
    return Picture("stages", "Time by stage", caption + told_first(len(rows), len(begun)), drawn)


def _bars(rows: Sequence[Job], name: str, ink: str) -> go.Bar:
    """Return the part of the stage ``name`` of each bar."""
    found = [(row, job, stage) for row, job in enumerate(rows) if (stage := job.run.stage(name))]
    texts = [
        told(job.name, f"{name} {tell(stage.seconds, 'seconds')}", "from the cache" * stage.cached)
        for _, job, stage in found
    ]
    shapes = ["/" if stage.cached else "" for *_, stage in found]
    hatched = {"shape": shapes, "fgcolor": colour("page"), "fillmode": "overlay", "solidity": 0.4}
    return go.Bar(
        x=[stage.seconds or 0 for *_, stage in found], y=[row for row, *_ in found], orientation="h", name=named(name),
        marker={"color": ink, "pattern": hatched, "line": {"width": 0}},
        **shown(texts, [job.link for _, job, _ in found]),
    )  # fmt: skip
