"""The closing table of a sweep: every job, what came of it and where it lies, those too that never began."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from offstage.pipeline.errors import KilledError, StorageError
from offstage.pipeline.installed_stages import metric_table
from offstage.pipeline.job_folder import may_be_at_work
from offstage.pipeline.metrics import Metric
from offstage.pipeline.provenance import provenance
from offstage.pipeline.record import RunRecord
from offstage.pipeline.report.quantities import tell
from offstage.pipeline.sweeps.record import SweepJob, SweepRecord, find_record, own_overrides
from offstage.pipeline.sweeps.trust import resume_command
from offstage.pipeline.terminal import COLOURS, plain_table, shorten

LOST = "its process was lost before it could say why; see screen.log there, or .submitit in the sweep's folder"
_MOMENT, _PATIENCE = 0.05, 10.0
"""Seconds between looks at a record that isn't closed, and how long a job is given to close it."""


def settled(folder: Path, job: SweepJob) -> Mapping[str, Any]:
    """Return the record of a job of the sweep in ``folder`` that has ended, empty if it has none.

    A job whose waiting process was killed is itself still ending, and says how in a moment; one that was lost on the
    way is marked so, and one that somebody may still be at is left alone.
    """
    until = time.monotonic() + _PATIENCE
    while (record := find_record(folder, job)) is not None and record.data["status"] == "running":
        if time.monotonic() > until:
            _give_up(record)
            break
        time.sleep(_MOMENT)
    return record.data if record is not None else {}


def _give_up(record: RunRecord) -> None:
    with suppress(StorageError):  # a disk that is full: the table has it all the same
        if not may_be_at_work(record.path.parent):
            record.finish("failed", error=KilledError(LOST))


def show_sweep(console: Console, folder: Path, sweep: SweepRecord, ended: Collection[int]) -> None:
    """Print the closing table of the sweep in ``folder``; of each job's overrides those that not all have.

    Of the jobs whose numbers have ``ended`` one without a record was lost; another hasn't begun.
    """
    records = {job.number: _record(folder, job, has_ended=job.number in ended) for job in sweep.jobs}
    leading = _leading(list(records.values()))
    numbers = ["job", *(metric.title or metric.name for metric in leading), "host peak"]
    headings = ["job", "overrides", "status", *numbers[1:], "figures", "reason", "folder"]
    folded = ("overrides", "figures", "reason", "folder")
    table = plain_table([(title, title in numbers) for title in headings], folded=folded)
    own = own_overrides(sweep.jobs)
    for job in sorted(sweep.jobs, key=lambda job: job.number):
        cells = _cells(records[job.number], leading)
        lies = escape(shorten(folder / job.folder)) if job.folder is not None else ""
        table.add_row(str(job.number), escape(own[job.number]), *cells, lies)
    console.print(table)
    count = Counter(str(record["status"]) for record in records.values())
    console.print(f"\n{told(count)}, {escape(shorten(folder))}")
    goes_on = sweep.foreseen or count["interrupted"]  # a search takes failures as told
    if goes_on and count["completed"] < len(records):
        console.print(escape(f"to run what isn't completed: {resume_command(Path(shorten(folder)), sweep)}"))


def told(count: Mapping[str, int]) -> str:
    """Return how many jobs have which status, in words: ``2 of 12 completed, 1 interrupted, 9 not begun``."""
    others = [f"{number} {status}" for status, number in count.items() if number and status != "completed"]
    return ", ".join([f"{count.get('completed', 0)} of {sum(count.values())} completed", *others])


def _record(folder: Path, job: SweepJob, *, has_ended: bool) -> Mapping[str, Any]:
    if has_ended:
        return settled(folder, job) or {"status": "lost", "error": {"message": LOST}}
    record = find_record(folder, job)
    return record.data if record is not None else {"status": "not begun"}


def _leading(records: Sequence[Mapping[str, Any]]) -> list[Metric]:
    """Return the metrics that are shown of each job: those of its stages that lead, where any job has one."""
    tables = [metric_table(record) for record in records if record.get("metrics")]
    every = {name: metric for table in tables for name, metric in table.metrics.items() if metric.leads}
    return [each for name, each in every.items() if any(_metric(record, name) is not None for record in records)]


def _metric(record: Mapping[str, Any], name: str) -> float | None:
    found = record.get("metrics", {}).get(name)
    return found if isinstance(found, int | float) else None


def _cells(record: Mapping[str, Any], leading: Sequence[Metric]) -> list[str]:
    """Return a job's status, the metrics that are ``leading``, host peak, where they come from, and reason."""
    status = str(record["status"])
    peak = record.get("memory", {}).get("measured", {}).get("cpu")
    values = [(_metric(record, metric.name), metric.unit) for metric in leading]
    return [
        f"[{COLOURS.get(status, 'red')}]{escape(status)}[/]",
        *("" if value is None else escape(tell(value, unit)) for value, unit in values),
        tell(peak, "bytes") if peak else "",
        _figures(record),
        escape(reason(record)),
    ]


def _figures(record: Mapping[str, Any]) -> str:
    """Return whether the job measured its figures itself, how often, and whether others used the processor then."""
    if record.get("status") != "completed" or not record["memory"]["measured"]:
        return ""
    found = provenance(record)
    return found.told() + f", {found.busy} busy" * bool(found.busy)


def reason(record: Mapping[str, Any]) -> str:
    """Return why the run didn't complete, in one line; if it did, why no cap was tested that was asked for, if so."""
    error, enforcement = record.get("error"), record.get("enforcement") or {}
    if not error:
        return f"no memory cap was tested: {enforcement['how']}" if enforcement.get("enforced") is False else ""
    where = f"{error['stage']}: " if error.get("stage") else ""
    return f"{where}{'; '.join(error['message'].splitlines()) or error['type']}"
