"""Layer by layer, a row a plan: on which device each lies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import plotly.graph_objects as go

from offstage.pipeline.report.figures import (
    Picture,
    colour,
    device_colour,
    figure,
    hover_text,
    rows_called,
)
from offstage.pipeline.report.quantities import device_title, in_tier_order, listed
from offstage.pipeline.report.run_folders import Job
from offstage.pipeline.run_schema import PlacedLayers

Plan = tuple[PlacedLayers, ...]
"""Where the layers lie, in the order of execution."""
_Piece = tuple[str, float, float, str]


def placement_picture(jobs: Sequence[Job], labels: Mapping[str, str], *, most: int) -> Picture | None:
    """Return the map of the first ``most`` plans of ``jobs``, None where none has one."""
    plans: dict[Plan, list[Job]] = {}
    for job in jobs:
        if job.run.layers:
            plans.setdefault(job.run.layers, []).append(job)
    if not plans:
        return None
    drawn = list(plans)[:most]
    alike = [plans[plan] for plan in drawn]
    names = [labels[each[0].name] if len(each) == 1 else listed([job.name for job in each], most=6) for each in alike]
    rows = [(name, each[0].link) for name, each in zip(names, alike, strict=True)]
    pieces = [(row, piece) for row, plan in enumerate(drawn) for piece in _pieces(plan)]
    devices = in_tier_order(device for _, (device, *_) in pieces)
    traces = [_cells(device, [(row, piece) for row, piece in pieces if piece[0] == device]) for device in devices]
    longest = max(sum(layers.count for layers in plan) for plan in drawn)
    shown = figure(
        traces, rows=len(drawn), barmode="overlay", bargap=0.38, showlegend=True, yaxis=rows_called(rows),
        xaxis={"title": {"text": "layer"}, "showgrid": False, "range": [0, longest]},
    )  # fmt: skip
    caption = f"One row a plan, its layers in the order of execution: from {drawn[0][0].first} to {drawn[0][-1].last}."
    caption += " A layer of two colours has tensors on both."
    if left_out := len(plans) - len(drawn):
        caption += f" {left_out:,} further plans are not drawn."
    return Picture("placement", "Where each layer lies", caption, shown)


def _cells(device: str, pieces: Sequence[tuple[int, _Piece]]) -> go.Bar:
    """Return the runs of layers on ``device``, each with its name where it fits: colour isn't all that tells them."""
    return go.Bar(
        base=[start for _, (_, start, _, _) in pieces], x=[width for _, (_, _, width, _) in pieces],
        y=[row for row, _ in pieces], orientation="h", name=device_title(device), text=device,
        textposition="inside", insidetextanchor="middle", textangle=0, constraintext="inside",
        textfont={"color": colour("on-dark" if device in ("0", "2") else "on-light")}, hoverinfo="text",
        hovertext=[hover_text(text, f"on {device_title(device)}") for _, (*_, text) in pieces],
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
