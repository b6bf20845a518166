"""Peaks of memory against the budget, and memory over time; what the process holds without any weight told apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import plotly.graph_objects as go

from offstage.pipeline.report.figures import (
    EARLIER,
    SERIES,
    Picture,
    colour,
    device_colour,
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
from offstage.pipeline.report.quantities import device_title, tell
from offstage.pipeline.report.run_folders import Job
from offstage.pipeline.report.speed import known_bytes
from offstage.pipeline.report.table import devices
from offstage.pipeline.run_schema import Number, Run

MOST_DEVICES = 4
HOST = "cpu"
BASE = "the process without weights"
PREDICTED, BUDGET = "predicted peak", "budget of weights"


def base_bytes(run: Run, device: str) -> Number:
    """Return what the process held on ``device`` before any weight: nothing but on the host, or where it isn't known.

    It is never more than the peak that was measured with it.
    """
    base = run.metric("base_host_bytes") if device == HOST else None
    return min(base or 0, known_bytes(run.memory.measured).get(device, 0))


def memory_picture(jobs: Sequence[Job], labels: Mapping[str, str], *, most: int) -> Picture | None:
    """Return budget, prediction and measured peak by device, None where no job measured any."""
    measured = [job for job in jobs if known_bytes(job.run.memory.measured)]
    rows, columns = measured[:most], devices(measured, lambda run: run.memory.measured)[:MOST_DEVICES]
    if not rows or not columns:
        return None
    traces: list[Any] = []
    axes = []
    for place, device in enumerate(columns):
        traces += _peaks(rows, device, first=not place, **on_panel(place))
        ends = [end for job in rows for end in (*_limits(job.run, device), job.run.memory.measured.get(device)) if end]
        axes.append((scale(device_title(device), "bytes", ends, linear=True), named_rows(rows, labels)))
    drawn = figure(
        traces, rows=len(rows), panels=len(columns), barmode="stack", bargap=0.38, showlegend=True, **stacked(axes)
    )
    caption = _caption(rows) + told_first(len(rows), len(measured))
    return Picture("memory", "Memory against the budget", caption, drawn)


def _caption(rows: Sequence[Job]) -> str:
    bases = [base_bytes(job.run, HOST) for job in rows]
    text = "Bars are measured, lines across them are not. The budget counts weights alone; peaks count all that the "
    text += "process holds"
    if any(bases):
        rest = "" if all(bases) else ", where the record has that part"
        text += f". What it held before any weight (Python, torch, transformers) is a part of its own{rest}, and the"
        text += " budget begins at its end."
    else:
        text += ", on the cpu Python and torch too."
    return text + f" An outlined bar was {EARLIER}." * any(job.run.provenance.is_cached for job in rows)


def _peaks(rows: Sequence[Job], device: str, *, first: bool, **panel: Any) -> Iterator[Any]:
    """Yield the bars of ``device``, the process's part before the rest, and the lines across them."""
    peaks = [known_bytes(job.run.memory.measured).get(device, 0) for job in rows]
    bases = [base_bytes(job.run, device) for job in rows]
    title, links = f"measured peak, {device_title(device)}", [job.link for job in rows]
    texts = [
        hover_text(job.name, f"{title} {tell(peak, 'bytes')}", EARLIER * job.run.provenance.is_cached)
        for job, peak in zip(rows, peaks, strict=True)
    ]
    if any(bases):
        parts = [hover_text(job.name, f"{BASE} {tell(base, 'bytes')}") for job, base in zip(rows, bases, strict=True)]
        yield _bar(rows, bases, colour("rest"), name=BASE, **panel, **shown(parts, links))
    rest = [peak - base for peak, base in zip(peaks, bases, strict=True)]
    yield _bar(rows, rest, device_colour(device), name=title, **panel, **shown(texts, links))
    for place, (name, ink) in enumerate({PREDICTED: SERIES[1], BUDGET: colour("ink")}.items()):
        ends = [(row, job, end) for row, job in enumerate(rows) if (end := _limits(job.run, device)[place]) is not None]
        yield go.Scatter(
            x=[end for *_, end in ends], y=[row for row, *_ in ends], mode="markers", name=name, legendgroup=name,
            showlegend=first, marker={"symbol": "line-ns-open", "size": 20, "color": ink, "line": {"width": 2.5}},
            **shown([_told(job, device, name, end) for _, job, end in ends], [job.link for _, job, _ in ends]), **panel,
        )  # fmt: skip


def _told(job: Job, device: str, name: str, end: Number) -> str:
    begins = base_bytes(job.run, device) if name == BUDGET else 0
    return hover_text(
        job.name, f"{name} {tell(end - begins, 'bytes')}", f"ends at {tell(end, 'bytes')}" if begins else ""
    )


def _bar(rows: Sequence[Job], lengths: Sequence[Number], ink: str, **more: Any) -> go.Bar:
    """Return a bar a row, an outline where an earlier run measured it."""
    faces = [colour("page") if job.run.provenance.is_cached else ink for job in rows]
    marker = {"color": faces, "line": {"color": ink, "width": 1.5}}
    return go.Bar(x=list(lengths), y=list(range(len(rows))), orientation="h", marker=marker, **more)


def _limits(run: Run, device: str) -> tuple[Number | None, Number | None]:
    """Return the predicted peak, and where the budget of weights ends that begins beside the process itself."""
    budget = known_bytes(run.memory.budget).get(device)
    return known_bytes(run.memory.predicted).get(device), None if budget is None else base_bytes(run, device) + budget


def timeline_picture(jobs: Sequence[Job], labels: Mapping[str, str]) -> Picture | None:
    """Return memory over time of the jobs that ran, None where no record of one holds a series.

    One that was refused, or served from the cache, held no weights.
    """
    timed = [job for job in jobs if _ran(job.run) and any(job.run.memory.series.values())]
    rows, columns = timed[: len(SERIES)], devices(timed, lambda run: dict.fromkeys(run.memory.series))[:MOST_DEVICES]
    if not rows or not columns:
        return None
    traces: list[Any] = []
    axes = []
    for place, device in enumerate(columns):
        curves = list(_curves(rows, device, labels, first=not place, **on_panel(place)))
        traces += curves
        x, y = ([value for curve in curves for value in curve[name]] for name in "xy")
        axes.append((scale("time", "seconds", x, linear=True), scale(device_title(device), "bytes", y, linear=True)))
    caption = "What each device held while the job ran; a dotted line is where the budget of weights ends."
    caption += " It begins above the process itself." * any(base_bytes(job.run, HOST) for job in rows)
    drawn = figure(traces, panels=len(columns), showlegend=True, **stacked(axes))
    return Picture("timeline", "Memory over time", caption + told_first(len(rows), len(timed)), drawn)


def _ran(run: Run) -> bool:
    """Return whether ``run`` came to weights of its own: it measured, or ended early after it had a plan."""
    if run.status == "completed":
        return bool(known_bytes(run.memory.measured)) and not run.provenance.is_cached
    return bool(known_bytes(run.memory.predicted))


def _curves(
    rows: Sequence[Job], device: str, labels: Mapping[str, str], *, first: bool, **panel: Any
) -> Iterator[go.Scatter]:
    """Yield what each job held on ``device``, its budget, and below them what the process is without weights.

    The jobs' differ by little, and the middle one stands for all.
    """
    longest = max((second for job in rows for second, _ in job.run.memory.series.get(device, ())), default=0)
    if bases := [base for job in rows if (base := base_bytes(job.run, device))]:
        yield go.Scatter(
            x=[0, longest], y=[median(bases)] * 2, fill="tozeroy", mode="lines", name=BASE, hoverinfo="name",
            line={"color": colour("rest"), "width": 0.5}, **panel,
        )  # fmt: skip
    for index, job in enumerate(rows):
        curve, limit = job.run.memory.series.get(device, ()), _limits(job.run, device)[1]
        group = {"legendgroup": job.name, **panel}
        texts = [
            hover_text(job.name, f"{tell(amount, 'bytes')} after {tell(second, 'seconds')}") for second, amount in curve
        ]
        yield go.Scatter(
            x=[second for second, _ in curve], y=[amount for _, amount in curve], mode="lines",
            name=named(labels[job.name]), line={"color": SERIES[index], "width": 1.8}, showlegend=first, **group,
            **shown(texts, [job.link] * len(curve)),
        )  # fmt: skip
        if limit is not None:
            yield go.Scatter(
                x=[0, longest], y=[limit] * 2, mode="lines", line={"color": SERIES[index], "dash": "dot", "width": 1.4},
                showlegend=False, hoverinfo="text", hovertext=_told(job, device, BUDGET, limit), **group,
            )  # fmt: skip
