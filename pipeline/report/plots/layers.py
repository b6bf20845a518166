"""Layer by layer, a row a plan or a job: on which device each lies, and how often a mixture's experts were in slots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import plotly.graph_objects as go

from offstage.pipeline.report.figures import (
    EARLIER,
    SERIES,
    Picture,
    colour,
    device_colour,
    figure,
    named_rows,
    rows_called,
    told,
    told_first,
)
from offstage.pipeline.report.placements import PlacedLayer, Placements, RunPlacement, device_title, in_tier_order
from offstage.pipeline.report.quantities import listed
from offstage.pipeline.report.run_folders import Job
from offstage.pipeline.run_schema import Number

_Piece = tuple[str, float, float, str]


def placement_picture(placements: Placements, jobs: Sequence[Job], labels: Mapping[str, str]) -> Picture | None:
    """Return the map of ``jobs``, None where every plan was pruned from the cache or there never was one."""
    plans = placements.plans
    if not plans:
        return None
    links = {job.name: job.link for job in jobs}
    names = [(_row_name(plan, labels), links[plan.jobs[0]]) for plan in plans]
    pieces = [(row, piece) for row, plan in enumerate(plans) for piece in _pieces(plan.layers)]
    devices = in_tier_order(device for _, (device, *_) in pieces)
    traces = [_cells(device, [(row, piece) for row, piece in pieces if piece[0] == device]) for device in devices]
    drawn = figure(
        traces, rows=len(plans), barmode="overlay", bargap=0.38, showlegend=True, yaxis=rows_called(names),
        xaxis={"title": {"text": "layer"}, "showgrid": False, "range": [0, max(len(plan.layers) for plan in plans)]},
    )  # fmt: skip
    return Picture("placement", "Where each layer lies", _caption(placements), drawn)


def _caption(placements: Placements) -> str:
    first, last = placements.plans[0].layers[0].name, placements.plans[0].layers[-1].name
    parts = [f"One row a plan, its layers in the order of execution: from {first} to {last}."]
    parts.append("A layer of two colours has tensors on both.")
    if placements.pruned:
        parts.append(f"The cache no longer has the plan of {listed(placements.pruned)}.")
    if placements.left_out:
        parts.append(f"{placements.left_out:,} further plans are not drawn.")
    return " ".join(parts)


def _row_name(plan: RunPlacement, labels: Mapping[str, str]) -> str:
    return labels[plan.jobs[0]] if len(plan.jobs) == 1 else listed(plan.jobs, most=6)


def _cells(device: str, pieces: Sequence[tuple[int, _Piece]]) -> go.Bar:
    """Return the runs of layers on ``device``, each with its name where it fits: colour isn't all that tells them."""
    return go.Bar(
        base=[start for _, (_, start, _, _) in pieces], x=[width for _, (_, _, width, _) in pieces],
        y=[row for row, _ in pieces], orientation="h", name=device_title(device), text=device,
        textposition="inside", insidetextanchor="middle", textangle=0, constraintext="inside",
        textfont={"color": colour("on-dark" if device in ("0", "2") else "on-light")}, hoverinfo="text",
        hovertext=[told(text, f"on {device_title(device)}") for _, (*_, text) in pieces],
        marker={"color": device_colour(device), "line": {"color": colour("page"), "width": 1}},
    )  # fmt: skip


def _pieces(layers: Sequence[PlacedLayer]) -> Iterator[_Piece]:
    """Yield device, start, width and words of every run of layers that lie alike, a part of the width a device."""
    start = 0
    for devices, group in groupby(layers, key=lambda layer: layer.devices):
        run = list(group)
        text = run[0].name if len(run) == 1 else f"{len(run)} layers, {run[0].name} to {run[-1].name}"
        each = len(run) / len(devices)
        for place, device in enumerate(devices):
            yield device, start + place * each, each, text
        start += len(run)


def expert_picture(jobs: Sequence[Job], labels: Mapping[str, str], *, most: int) -> Picture | None:
    """Return the layers' rates of hits, a cell each, None where no job had experts that wait."""
    mixtures = [job for job in jobs if job.run.experts]
    rows = mixtures[:most]
    if not rows:
        return None
    layers = list(rows[0].run.experts)
    longest = max(len(job.run.experts) for job in rows)
    shares = [[hit_share(use) for use in job.run.experts.values()] for job in rows]
    texts = [
        [told(job.name, layer, "no calls" if share is None else f"hit rate {share:.1%}",
              EARLIER * job.run.provenance.is_cached) for layer, share in zip(job.run.experts, row, strict=True)]
        for job, row in zip(rows, shares, strict=True)
    ]  # fmt: skip
    trace = go.Heatmap(
        z=[row + [None] * (longest - len(row)) for row in shares], zmin=0, zmax=1, xgap=1, ygap=6, hoverinfo="text",
        hovertext=[row + [""] * (longest - len(row)) for row in texts],
        colorscale=[[0, colour("grid")], [1, SERIES[0]]], colorbar={"tickformat": ".0%", "thickness": 10},
    )  # fmt: skip
    caption = "One cell a layer whose experts stream, by the hit rate of its expert cache in the whole run:"
    caption += f" from {layers[0]} to {layers[-1]}."
    axis = {"title": {"text": "layer with experts"}, "showgrid": False}
    drawn = figure([trace], rows=len(rows), xaxis=axis, yaxis=named_rows(rows, labels))
    return Picture("experts", "Expert cache hit rate", caption + told_first(len(rows), len(mixtures)), drawn)


def hit_share(use: Mapping[str, Number | None]) -> float | None:
    """Return which share of a layer's calls found their expert in a slot, None where there were none, or no counts."""
    hits, misses = use.get("hits"), use.get("misses")
    if hits is None or misses is None or hits < 0 or misses < 0 or not hits + misses:
        return None
    return hits / (hits + misses)
