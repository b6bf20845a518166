"""A sweep's screen: a line as each job ends, and a closing table with every job and its reason."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from pipeline.errors import KilledError, StorageError
from pipeline.hydra_task import Outcome
from pipeline.provenance import provenance
from pipeline.record import RECORD, RunRecord
from pipeline.terminal import shorten

LOST = "its process was lost before it could say why; see .submitit in the sweep's folder"
_FIGURES = {"s/token": "decode_seconds_per_token", "perplexity": "perplexity"}
"""What is shown of each job, where any has it: the metric by its title."""
_MOMENT, _PATIENCE = 0.05, 10.0
"""Seconds between looks at a record that isn't closed, and how long a job is given to close it."""
_COLOURS = {"completed": "green", "failed": "red", "interrupted": "yellow"}


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """Return the exit code of the first job that didn't end well, 0 if all did."""
    codes = (1 if outcome.code is None else outcome.code for outcome in outcomes)
    return next((code for code in codes if code), 0)


def show_progress(sweep: Path | None, outcome: Outcome) -> None:
    """Print one line about a job that has just ended."""
    if sweep is None:
        return
    found = settled(sweep, outcome)
    reason = f": {_reason(found)}" if found.get("error") else ""
    line = f"job {outcome.number}  {' '.join(outcome.overrides)}  {found.get('status', 'lost')}{reason}"
    sys.stdout.write(line.splitlines()[0] + "\n")
    sys.stdout.flush()


def settled(sweep: Path, outcome: Outcome) -> Mapping[str, Any]:
    """Return the record of the job, empty if it has none. One that was lost on the way is marked so."""
    path = _find(sweep, outcome)
    if path is None:
        return {}
    record = _with_last_words(path)
    if record.data["status"] == "running":
        record.finish("failed", error=KilledError(LOST))
    return record.data


def _with_last_words(path: Path) -> RunRecord:
    """Return the record; a job whose waiting process was killed is itself still ending, and says how in a moment."""
    until = time.monotonic() + _PATIENCE
    while (record := RunRecord.load(path)).data["status"] == "running" and time.monotonic() < until:
        time.sleep(_MOMENT)
    return record


def _find(sweep: Path, outcome: Outcome) -> Path | None:
    """Return where the job's record lies: in the folder of its number, or wherever ``hydra.sweep.subdir`` says."""
    usual = sweep / str(outcome.number) / RECORD
    if usual.is_file():
        return usual
    for path in sorted(sweep.glob(f"**/{RECORD}")):
        if _overrides(path) == list(outcome.overrides):
            return path
    return None


def _overrides(path: Path) -> list[str] | None:
    try:
        return list(RunRecord.load(path).data["overrides"])
    except StorageError:
        return None


def show_sweep(console: Console, sweep: Path, outcomes: Sequence[Outcome]) -> None:
    """Print the closing table; of each job's overrides those that not all have."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("job", justify="right", no_wrap=True)
    table.add_column("overrides", overflow="fold")
    table.add_column("status", no_wrap=True)
    records = {outcome.number: settled(sweep, outcome) for outcome in outcomes}
    figures = {title: name for title, name in _FIGURES.items() if any(_metric(one, name) for one in records.values())}
    for title in (*figures, "host peak"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("figures", overflow="fold")
    table.add_column("reason", overflow="fold")
    common = set.intersection(*(set(outcome.overrides) for outcome in outcomes)) if len(outcomes) > 1 else set()
    for outcome in sorted(outcomes, key=lambda outcome: outcome.number):
        own = [override for override in outcome.overrides if override not in common]
        cells = _cells(records[outcome.number], list(figures.values()))
        table.add_row(str(outcome.number), escape(" ".join(own)), *cells)
    console.print(table)
    well = sum(outcome.code == 0 for outcome in outcomes)
    console.print(f"\n{well} of {len(outcomes)} jobs completed, {shorten(sweep)}")


def _metric(record: Mapping[str, Any], name: str) -> float | None:
    found: float | None = record.get("metrics", {}).get(name)
    return found


def _cells(record: Mapping[str, Any], figures: Sequence[str]) -> list[str]:
    """Return a job's status, the metrics that ``figures`` names, host peak, where they come from, and reason."""
    status = record.get("status", "lost")
    peak = record.get("memory", {}).get("measured", {}).get("cpu")
    values = [_metric(record, name) for name in figures]
    return [
        f"[{_COLOURS.get(status, 'red')}]{status}[/]",
        *(f"{value:.4f}" if value else "" for value in values),
        decimal(peak) if peak else "",
        _figures(record),
        escape(_reason(record)) if record else LOST,
    ]


def _figures(record: Mapping[str, Any]) -> str:
    """Return whether the job measured its figures itself, how often, and whether others used the processor then."""
    if record.get("status") != "completed" or not record["memory"]["measured"]:
        return ""
    found = provenance(record["stages"], record.get("samples", ()))
    return found.told() + f", {found.busy} busy" * bool(found.busy)


def _reason(record: Mapping[str, Any]) -> str:
    """Return why the run didn't complete, in one line; if it did, why no cap was tested that was asked for, if so."""
    error, enforcement = record.get("error"), record.get("enforcement") or {}
    if not error:
        return f"no memory cap was tested: {enforcement['how']}" if enforcement.get("enforced") is False else ""
    where = f"{error['stage']}: " if error.get("stage") else ""
    return f"{where}{'; '.join(error['message'].splitlines()) or error['type']}"
