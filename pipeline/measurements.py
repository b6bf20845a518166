"""What a run cost, as tables for the terminal: its metrics, the peaks of its devices, and its links.

They are made of the record alone, by the table of metrics that it has, so that whichever stage comes last is shown by
them. What isn't known has no cell, nor has a time or a share of nothing, and a table that says nothing isn't there. A
prediction stands beside what was measured, or alone where nothing was: one of a token says nothing of a run that made
none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.markup import escape
from rich.table import Table

from offstage.pipeline.installed_stages import metric_table
from offstage.pipeline.metrics import KIND_TITLES, Metric
from offstage.pipeline.report.quantities import linked_devices, scale_for, tell
from offstage.pipeline.run_schema import Run
from offstage.pipeline.terminal import plain_table

_DISK = "disk"


def measurements(run: Run) -> Iterator[Table]:
    """Yield the tables of what the record of ``run`` says was measured and predicted.

    The times of decoding and its bytes are a forward's, however many sequences share it.
    """
    metrics, table = run.metrics, metric_table(run)
    shown = [row for row in table.rows() if not row[0].aside]
    cells_by_name = [(row[0], {one.kind: _cell(one, metrics.get(one.name)) for one in row}) for row in shown]
    planned = not any(cells.get("measured") for _, cells in cells_by_name)
    rows = [
        [of.title, cells.get("measured", ""), _range(run, of), cells.get("predicted", ""), cells.get("lower_bound", "")]
        for of, cells in cells_by_name
        if cells.get("measured") or (planned and any(cells.values()))
    ]
    how = run.provenance.describe() + " (accelerators simulated)" * bool(metrics.get("simulated_accelerators"))
    expected = [KIND_TITLES[kind] for kind in ("predicted", "lower_bound")]
    yield from _table(["", how, "least to largest", *expected], rows)
    peaks = (run.memory.measured, run.memory.predicted)
    devices = [
        [device, *("" if one.get(device) is None else tell(one[device], "bytes") for one in peaks)]
        for device in dict.fromkeys((*run.memory.predicted, *run.memory.measured))
        if device != _DISK
    ]
    yield from _table(["device", "peak", "predicted"], devices)
    links = [
        [device, *(_cell(metric, metrics.get(metric.on(device))) for metric in table.links())]
        for device in linked_devices(table, metrics)
    ]
    yield from _table(["streamed to", *(metric.heading for metric in table.links())], links)


def remarks(run: Run) -> Iterator[str]:
    """Yield what must be known of the metrics of ``run`` by who uses them, whichever stages it is of."""
    of = run.provenance
    if of.contended and of.repeats > 1:  # of one alone nobody asked how far it is to be trusted: its record says it
        yield (
            f"Others used the processor in {of.contended} of {of.repeats} repeats: the times say less of this run; "
            "measure.fresh=true measures again."
        )
    yield from run.compared


def _cell(metric: Metric, value: float | str | None) -> str:
    if isinstance(value, str):
        return value
    if value is None or (not value and metric.unit in ("seconds", "share")):
        return ""
    return tell(value, metric.unit)


def _range(run: Run, metric: Metric) -> str:
    """Return the least and the largest of the repeats of a time, empty where there aren't several."""
    values = [value for repeat in run.counting if (value := repeat.metric(metric.name)) is not None]
    if metric.unit != "seconds" or len(values) < 2:
        return ""
    scale = scale_for(values, metric.unit)
    return f"{scale.number(min(values))} to {scale.text(max(values))}"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[Table]:
    """Yield ``rows`` as a table without the columns that are empty, or nothing if the rows say nothing."""
    shown = [place for place in range(len(headings)) if any(row[place] for row in rows)]
    if len(shown) < 2:
        return
    table = plain_table([(headings[place], place > 0) for place in shown])
    for row in rows:
        table.add_row(*(escape(row[place]) for place in shown))
    yield table
