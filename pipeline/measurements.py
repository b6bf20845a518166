"""What a run cost, as tables for the terminal: its figures, the peaks of its devices, and its links.

They are made of the record alone, by the names that every stage's metrics have there, so that whichever stage comes
last is shown by them. What isn't known has no cell, and a table that says nothing isn't there. A prediction stands
beside what was measured, or alone where nothing was: one of a token says nothing of a run that made none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from offstage.pipeline.provenance import provenance
from offstage.pipeline.report.links import LINK_FIGURES, linked_devices
from offstage.pipeline.report.quantities import Kind, scale_for, tell

_DISK = "disk"


@dataclass(frozen=True, slots=True)
class Figure:
    """One row: the metrics that say what was measured, what the plan predicted, and the least that it could have been.

    An empty name stands for what there is no metric for; a null ``kind`` for words.
    """

    title: str
    kind: Kind | None
    measured: str
    predicted: str = ""
    bound: str = ""


FIGURES = (
    Figure("loading", "seconds", "load_seconds"),
    Figure("time to first token", "seconds", "time_to_first_token_seconds"),
    Figure(
        "time a token",
        "seconds",
        "decode_seconds_per_token",
        "predicted_seconds_per_token",
        "bound_seconds_per_token",
    ),
    Figure("perplexity", "number", "perplexity"),
    Figure("bits a byte", "number", "bits_per_byte"),
    Figure("tokens scored a second", "rate", "scored_tokens_per_second"),
    Figure("bound by", None, "bound", "predicted_bound"),
    Figure("streamed a token", "bytes", "streamed_bytes_per_token", "predicted_streamed_bytes_per_token"),
    Figure("drafts judged", None, "speculation"),
    Figure("tokens a pass", "number", "tokens_per_pass"),
    Figure("drafts accepted", "share", "draft_acceptance"),
    Figure("experts found in slots", "share", "expert_hit_rate", "predicted_expert_hit_rate"),
    Figure("scoring", "seconds", "score_seconds"),
    Figure("forwards", "seconds", "forward_seconds"),
    Figure("streamed a forward", "bytes", "streamed_bytes_per_forward"),
    Figure("stall share", "share", "stall_share"),
)
"""The times of decoding and its bytes are a forward's, however many sequences share it."""


def measurements(record: Mapping[str, Any]) -> Iterator[Table]:
    """Yield the tables of what ``record`` says was measured and predicted."""
    metrics, memory = record["metrics"], record["memory"]
    cells = [[_cell(metrics, figure.kind, name) for name in _names(figure)] for figure in FIGURES]
    planned = not any(measured for measured, _, _ in cells)
    rows = [
        [figure.title, row[0], _range(record, figure), *row[1:]]
        for figure, row in zip(FIGURES, cells, strict=True)
        if row[0] or (planned and any(row))
    ]
    yield from _table(["", _how(record), "least to largest", "predicted", "bound"], rows)
    yield from _table(["device", "peak", "predicted"], list(_devices(memory)))
    yield from _table(["streamed to", *(figure.title for figure in LINK_FIGURES)], list(_links(metrics)))


def remarks(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield what must be known of the figures of ``record`` by who uses them."""
    found, enforcement = provenance(record["stages"], record.get("samples", ())), record.get("enforcement") or {}
    if found.busy:
        yield (
            f"Others used the processor in {found.busy} of {found.samples} samples: the times say less of this run; "
            "measure.fresh=true measures again."
        )
    if record["metrics"].get("speculation") == "batched":
        yield (
            "Several drafts were judged in one forward (generate.speculation=batched): the last bits of what is "
            "computed, and so tokens, may differ from those of plain decoding."
        )
    if layers := record["metrics"].get("host_layers"):
        yield (
            f"{layers} layers computed on the host, where they lie (execution=fastest): the last bits of what is "
            "computed, and so tokens, may differ from those of other placements."
        )
    yield from record.get("compared", ())
    if "predicted_expert_hit_rate" in record["metrics"]:
        yield ("The plan assumed uniform routing: the bytes and seconds of a token may be far from those predicted.")
    if enforcement.get("enforced") is False:
        yield f"No memory cap was tested: {enforcement['how']}."


def _names(figure: Figure) -> tuple[str, str, str]:
    return figure.measured, figure.predicted, figure.bound


def _cell(metrics: Mapping[str, Any], kind: Kind | None, name: str) -> str:
    value = metrics.get(name)
    if value is None or kind is None:
        return value or ""
    return tell(value, kind)


def _range(record: Mapping[str, Any], figure: Figure) -> str:
    """Return the least and the largest of the samples of a time, empty where there aren't several."""
    counting = [sample["metrics"] for sample in record.get("samples", ()) if sample.get("counts")]
    values = [value for metrics in counting if (value := metrics.get(figure.measured)) is not None]
    if figure.kind != "seconds" or len(values) < 2:
        return ""
    scale = scale_for(values, "seconds")
    return f"{scale.number(min(values))} to {scale.text(max(values))}"


def _how(record: Mapping[str, Any]) -> str:
    """Return in words how the figures were had: in this run or in an earlier one, with real accelerators or not."""
    simulated = bool(record["metrics"].get("simulated_accelerators"))
    found = provenance(record["stages"], record.get("samples", ()))
    return found.told() + " (accelerators simulated)" * simulated


def _devices(memory: Mapping[str, Mapping[str, int | None]]) -> Iterator[list[str]]:
    """Yield a row for each device that computes or holds weights in memory."""
    measured, predicted = memory["measured"], memory["predicted"]
    for device in dict.fromkeys((*predicted, *measured)):
        if device != _DISK:
            peak, expected = measured.get(device), predicted.get(device)
            yield [device, *("" if held is None else tell(held, "bytes") for held in (peak, expected))]


def _links(metrics: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield a row for each device that weights are streamed to, where there are several."""
    for device in linked_devices(metrics):
        yield [device, *(_cell(metrics, figure.kind, figure.name(device)) for figure in LINK_FIGURES)]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[Table]:
    """Yield ``rows`` as a table without the columns that are empty, or nothing if the rows say nothing."""
    shown = [place for place in range(len(headings)) if any(row[place] for row in rows)]
    if len(shown) < 2:
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for place in shown:
        table.add_column(headings[place], justify="right" if place else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(escape(row[place]) for place in shown))
    yield table
