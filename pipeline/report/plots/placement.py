"""A map of placement: one row a plan, one cell a layer in the order of execution, one colour a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from offstage.pipeline.report.figures import (
    COLOURS,
    Key,
    Picture,
    RowName,
    Size,
    bar_place,
    device_colour,
    dress,
    ink_on,
    name_rows,
    picture,
    row_height,
)
from offstage.pipeline.report.placements import PlacedLayer, Placements, RunPlacement, device_title, in_tier_order
from offstage.pipeline.report.quantities import listed
from offstage.pipeline.report.run_folders import Job

MOST_CELLS = 4000
"""Past this many cells, neighbours on one device are drawn as one."""


def placement_picture(placements: Placements, jobs: Sequence[Job], labels: Mapping[str, str]) -> Picture | None:
    """Return the map of ``jobs``, None where every plan was pruned from the cache or there never was one."""
    plans = placements.plans
    if not plans:
        return None
    links = {job.name: job.link for job in jobs}
    names = [RowName(_row_name(plan, labels), links[plan.jobs[0]]) for plan in plans]
    devices = in_tier_order(device for plan in plans for layer in plan.layers for device in layer.devices)
    return picture(
        "placement",
        lambda figure, size: _paint(figure, size, plans, names),
        title="Where each layer lies",
        caption=_caption(placements),
        keys=[Key(device_colour(device), "fill", device_title(device)) for device in devices],
        height=lambda size: 70 + row_height(size) * len(plans),
    )


def _caption(placements: Placements) -> str:
    first, last = placements.plans[0].layers[0].name, placements.plans[0].layers[-1].name
    parts = [f"One row a plan, one cell a layer, in the order of execution: from {first} to {last}."]
    parts.append("A cell of two colours has tensors on both.")
    if placements.pruned:
        parts.append(f"The cache no longer has the plan of {listed(placements.pruned)}.")
    if placements.left_out:
        parts.append(f"{placements.left_out:,} further plans are not drawn.")
    return " ".join(parts)


def _paint(figure: Figure, size: Size, plans: Sequence[RunPlacement], names: Sequence[RowName]) -> None:
    axes = figure.subplots()
    dress(axes, x_label="layer")
    name_rows(axes, names, size=size)
    longest = max(len(plan.layers) for plan in plans)
    axes.set_xlim(0, longest)
    axes.xaxis.set_major_locator(MaxNLocator(5 if size.narrow else 10, integer=True))
    axes.grid(visible=False)
    apart = sum(len(plan.layers) for plan in plans) <= MOST_CELLS
    for row, plan in enumerate(plans):
        _cells(axes, row, plan.layers, size=size, gap=0.06 if apart else 0.0)
        _names(axes, row, plan.layers, size=size, room=longest / (30 if size.narrow else 90))


def _row_name(plan: RunPlacement, labels: Mapping[str, str]) -> str:
    return labels[plan.jobs[0]] if len(plan.jobs) == 1 else listed(plan.jobs, most=6)


def _cells(axes: Axes, row: int, layers: Sequence[PlacedLayer], *, size: Size, gap: float) -> None:
    """Draw the cells of one row, those of one device together: one artist a device and not one a cell."""
    offset, height = bar_place(size)
    spans: dict[str, list[tuple[float, float]]] = {}
    for device, start, width in _pieces(layers, whole=gap > 0):
        spans.setdefault(device, []).append((start + gap / 2, width - gap))
    for device, pieces in spans.items():
        axes.broken_barh(pieces, (row + offset - height / 2, height), color=COLOURS[device_colour(device)], linewidth=0)


def _pieces(layers: Sequence[PlacedLayer], *, whole: bool) -> Iterator[tuple[str, float, float]]:
    """Yield device, start and width of every piece of a cell, or of every run of equal cells where not ``whole``."""
    for devices, start, width in _spans(layers):
        count = width if whole else 1
        for cell in range(count):
            each = width / count / len(devices)
            for place, device in enumerate(devices):
                yield device, start + cell * width / count + place * each, each


def _names(axes: Axes, row: int, layers: Sequence[PlacedLayer], *, size: Size, room: float) -> None:
    """Write the device on every run of cells that is wide enough: colour is not all that tells devices apart."""
    offset, _ = bar_place(size)
    for devices, start, width in _spans(layers):
        if len(devices) == 1 and width > room * (len(devices[0]) + 1):
            ink = ink_on(device_colour(devices[0]))
            middle = (width - 1) // 2 + 0.5 if room * (len(devices[0]) + 1) < 1 else width / 2  # in one cell if it fits
            axes.text(start + middle, row + offset, devices[0], ha="center", va="center_baseline", color=ink)


def _spans(layers: Sequence[PlacedLayer]) -> Iterator[tuple[tuple[str, ...], int, int]]:
    """Yield devices, first layer and count of every run of layers that lie alike."""
    start = 0
    for devices, members in groupby(layers, key=lambda layer: layer.devices):
        width = len(list(members))
        yield devices, start, width
        start += width
