"""Layer by layer, a row a plan: on which device each lies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import plotly.graph_objects as go

from offstage.pipeline.report.figures import (
    Picture,
    colour,
    device_colour,
    figure,
    rows_called,
    told,
)
from offstage.pipeline.report.placements import Placements, RunPlacement, device_title, in_tier_order
from offstage.pipeline.report.quantities import listed
from offstage.pipeline.report.run_folders import Job
from offstage.pipeline.run_schema import PlacedLayers

_Piece = tuple[str, float, float, str]


def placement_picture(placements: Placements, jobs: Sequence[Job], labels: Mapping[str, str]) -> Picture | None:
    """Return the map of ``jobs``, None where none has a plan."""
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
        xaxis={"title": {"text": "layer"}, "showgrid": False, "range": [0, max(plan.count for plan in plans)]},
    )  # fmt: skip
    return Picture("placement", "Where each layer lies", _caption(placements), drawn)


def _caption(placements: Placements) -> str:
    first, last = placements.plans[0].layers[0].first, placements.plans[0].layers[-1].last
    parts = [f"One row a plan, its layers in the order of execution: from {first} to {last}."]
    parts.append("A layer of two colours has tensors on both.")
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


def _pieces(layers: Sequence[PlacedLayers]) -> Iterator[_Piece]:
    """Yield device, start, width and words of every run of layers that lie alike, a part of the width a device."""
    start = 0
    for run in layers:
        text = run.first if run.count == 1 else f"{run.count} layers, {run.first} to {run.last}"
        each = run.count / len(run.devices)
        for place, device in enumerate(run.devices):
            yield device, start + place * each, each, text
        start += run.count
