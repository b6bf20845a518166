"""Peaks of memory against the budget, by job and device; what the process holds without any weight told apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from offstage.pipeline.report.figures import (
    COLOURS,
    EARLIER,
    Key,
    Picture,
    Size,
    bar_place,
    device_colour,
    dress,
    in_unit,
    measure_linear,
    name_rows,
    picture,
    row_height,
    row_names,
    told_first,
)
from offstage.pipeline.report.placements import device_title
from offstage.pipeline.report.records import Number, Run
from offstage.pipeline.report.run_folders import Job
from offstage.pipeline.report.speed import known
from offstage.pipeline.report.table import devices

MOST_DEVICES = 4
HOST = "cpu"
BASE = "the process without weights: Python, torch, transformers"


def base_bytes(run: Run, device: str) -> Number:
    """Return what the process held on ``device`` before any weight: nothing but on the host, or where it isn't known.

    It is never more than the peak that was measured with it.
    """
    base = run.metric("base_host_bytes") if device == HOST else None
    return min(base or 0, known(run.measured).get(device, 0))


def memory_picture(jobs: Sequence[Job], labels: Mapping[str, str], *, most: int) -> Picture | None:
    """Return budget, prediction and measured peak by device, None where no job measured any."""
    measured = [job for job in jobs if known(job.run.measured)]
    rows, columns = measured[:most], devices(measured, lambda run: run.measured)[:MOST_DEVICES]
    if not rows or not columns:
        return None
    return picture(
        "memory",
        lambda figure, size: _paint(figure, size, rows, columns, labels),
        title="Memory against the budget",
        caption=_caption(rows) + told_first(len(rows), len(measured)),
        keys=_keys(rows, columns),
        height=lambda size: (90 + row_height(size) * len(rows)) * (len(columns) if size.narrow else 1),
    )


def _caption(rows: Sequence[Job]) -> str:
    bases = [base_bytes(job.run, HOST) for job in rows]
    told = "Bars are measured, lines across them are not. The budget counts weights alone; peaks count all that the "
    told += "process holds"
    if not any(bases):
        return told + ", on the cpu Python and torch too."
    rest = "" if all(bases) else ", where the record has that part"
    return told + f". What it held before any weight is a part of its own{rest}, and the budget begins at its end."


def _keys(rows: Sequence[Job], columns: Sequence[str]) -> list[Key]:
    keys = [Key(device_colour(device), "fill", f"measured peak, {device_title(device)}") for device in columns]
    keys += [Key("grid", "fill", BASE)] * any(base_bytes(job.run, HOST) for job in rows)
    keys += [Key("muted", "outline", EARLIER)] * any(job.run.provenance.is_cached for job in rows)
    return [*keys, Key("ink", "dotted-tick", "predicted peak"), Key("ink", "tick", "budget of weights")]


def _paint(figure: Figure, size: Size, rows: Sequence[Job], columns: Sequence[str], labels: Mapping[str, str]) -> None:
    shape = (len(columns), 1) if size.narrow else (1, len(columns))
    panels = figure.subplots(*shape, squeeze=False).ravel()
    for place, (axes, device) in enumerate(zip(panels, columns, strict=True)):
        _panel(axes, rows, device, size=size)
        name_rows(axes, row_names(rows, labels), size=size)
        if place and not size.narrow:
            axes.set_yticks([])


def _panel(axes: Axes, rows: Sequence[Job], device: str, *, size: Size) -> None:
    offset, height = bar_place(size)
    runs = [job.run for job in rows]
    every = [held for run in runs for held in (*_limits(run, device), known(run.measured).get(device)) if held]
    unit = measure_linear(axes, "x", every, "bytes", size=size)
    dress(axes, x_label=in_unit(device_title(device), unit))
    for row, (run, job) in enumerate(zip(runs, rows, strict=True)):
        base, peak = base_bytes(run, device), known(run.measured).get(device, 0)
        middle, hollow = row + offset, run.provenance.is_cached
        _bar(axes, (0, base), (middle, height), colour=COLOURS["grid"], hollow=hollow, link=job.link)
        _bar(axes, (base, peak), (middle, height), colour=COLOURS[device_colour(device)], hollow=hollow, link=job.link)
        predicted, budget = _limits(run, device)
        _line(axes, predicted, (middle, height), style=(0, (1, 1)))
        _line(axes, budget, (middle, height), style="-")


def _limits(run: Run, device: str) -> tuple[Number | None, Number | None]:
    """Return the predicted peak, and where the budget of weights ends that begins beside the process itself."""
    budget = known(run.budget).get(device)
    return known(run.predicted).get(device), None if budget is None else base_bytes(run, device) + budget


def _bar(
    axes: Axes, ends: tuple[Number, Number], place: tuple[float, float], *, colour: str, hollow: bool, link: str
) -> None:
    """Draw a bar between ``ends`` at ``place``, its middle and height; an outline where an earlier run measured it."""
    (begin, end), (middle, height) = ends, place
    if end > begin:
        face, edge = (COLOURS["page"], 1.6) if hollow else (colour, 0)
        axes.barh(
            middle, end - begin, height, left=begin, facecolor=face, edgecolor=colour, linewidth=edge, url=link or None
        )


def _line(axes: Axes, value: Number | None, place: tuple[float, float], *, style: object) -> None:
    """Draw a line across a bar with a rim in the page's colour, so that it shows on the bar in either scheme."""
    if value is None:
        return
    middle, height = place
    ends = [middle - height * 0.68, middle + height * 0.68]
    for colour, width, dashes in (("page", 4.5, "-"), ("ink", 1.8, style)):
        axes.plot([value] * 2, ends, color=COLOURS[colour], linewidth=width, linestyle=dashes, clip_on=False)
