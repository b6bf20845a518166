"""Times as rows, a job each: how far its repeats lie apart, as a box, and how long each stage took."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import plotly.graph_objects as go

from offstage.pipeline.report.figures import (
    SERIES,
    Picture,
    colour,
    figure,
    hover_text,
    named,
    named_rows,
    on_panel,
    scale,
    shown,
    stacked,
    told_first,
)
from offstage.pipeline.report.noise import FIRST_TOKEN, SECONDS, Noise
from offstage.pipeline.report.quantities import tell
from offstage.pipeline.report.run_folders import Job
from offstage.pipeline.run_schema import Number, Repeat

_Sampled = tuple[int, Job, Repeat, Number]
_PANELS = (("prompt: time to first token", FIRST_TOKEN), ("decoding: time a token", SECONDS))
_KINDS = {
    (False, False): ("a repeat", "circle", SERIES[0]),
    (True, False): ("taken by an earlier run", "circle-open", SERIES[0]),
    (False, True): ("taken while others used the processor", "x", SERIES[1]),
    (True, True): ("taken by an earlier run while others used the processor", "x-open", SERIES[1]),
}


def repeat_picture(jobs: Sequence[Job], labels: Mapping[str, str], within: Noise, *, most: int) -> Picture | None:
    """Return the boxes of the jobs that were measured several times, None where none was."""
    several = [job for job in jobs if len(job.run.counting) > 1]
    rows = several[:most]
    if not rows:
        return None
    by_panel = [
        [(row, job, one, time) for row, job in enumerate(rows) for one in job.run.counting
         if (time := one.metric(name)) is not None]
        for _, name in _PANELS
    ]  # fmt: skip
    panels = [_traces(repeats, first=not place, **on_panel(place)) for place, repeats in enumerate(by_panel)]
    axes = [
        (scale(title, "seconds", [time for *_, time in repeats]), named_rows(rows, labels))
        for (title, _), repeats in zip(_PANELS, by_panel, strict=True)
    ]
    caption = "The box has the middle half of a job's repeats, its line the median; the whiskers reach to the least and"
    caption += f" the largest, and every repeat has a mark. {within.describe()}" + told_first(len(rows), len(several))
    drawn = figure(chain(*panels), rows=len(rows), panels=len(_PANELS), showlegend=True, **stacked(axes))
    return Picture("repeats", "Repeats of each job", caption.strip(), drawn)


def _traces(repeats: Sequence[_Sampled], *, first: bool, **panel: Any) -> Iterator[Any]:
    """Yield the boxes of one panel, and its marks by their kind; the legend has those of the ``first`` alone."""
    yield go.Box(
        x=[time for *_, time in repeats], y=[row for row, *_ in repeats], orientation="h", boxpoints=False,
        name="the middle half", fillcolor=colour("bar"), line={"color": colour("ink"), "width": 1.4},
        hoverinfo="skip", width=0.6, legendgroup="box", showlegend=first, **panel,
    )  # fmt: skip
    for kind, (name, symbol, ink) in _KINDS.items():
        marks = [each for each in repeats if (each[2].earlier, each[2].is_contended) == kind]
        if marks:
            texts = [hover_text(job.name, tell(time, "seconds"), name) for _, job, _, time in marks]
            yield go.Scatter(
                x=[time for *_, time in marks], y=[row for row, *_ in marks], mode="markers", name=name,
                marker={"symbol": symbol, "color": ink, "size": 7}, legendgroup=name, showlegend=first,
                **shown(texts, [job.link for _, job, *_ in marks]), **panel,
            )  # fmt: skip


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
    parts = [(row, job, stage) for row, job in enumerate(rows) if (stage := job.run.stage(name))]
    texts = [
        hover_text(job.name, f"{name} {tell(stage.seconds, 'seconds')}", "from the cache" * stage.cached)
        for _, job, stage in parts
    ]
    shapes = ["/" if stage.cached else "" for *_, stage in parts]
    hatched = {"shape": shapes, "fgcolor": colour("page"), "fillmode": "overlay", "solidity": 0.4}
    return go.Bar(
        x=[stage.seconds or 0 for *_, stage in parts], y=[row for row, *_ in parts], orientation="h", name=named(name),
        marker={"color": ink, "pattern": hatched, "line": {"width": 0}},
        **shown(texts, [job.link for _, job, _ in parts]),
    )  # fmt: skip
