"""The closing table of a sweep: every job, what came of it and where it lies, those too that never began."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from offstage.pipeline.errors import KilledError, StorageError
from offstage.pipeline.installed_stages import metric_table
from offstage.pipeline.job_folder import find_record, may_be_at_work
from offstage.pipeline.metrics import Metric
from offstage.pipeline.record import RunRecord
from offstage.pipeline.report.quantities import tell
from offstage.pipeline.run_schema import Run
from offstage.pipeline.sweeps.record import SweepJob, SweepRecord, own_overrides, resume_command
from offstage.pipeline.terminal import COLOURS, plain_table, shorten

LOST = "its process was lost before it could say why; see screen.log there, or .submitit in the sweep's folder"
_MOMENT, _PATIENCE = 0.05, 10.0
"""Seconds between looks at a record that isn't closed, and how long a job is given to close it."""


@dataclass(frozen=True, slots=True)
class JobState:
    """How far a job is: its ``run``, null where there is no record of one: it was lost, or it hasn't begun."""

    run: Run | None
    has_ended: bool

    @property
    def status(self) -> str:
        """Return the run's status, or what there is instead of one."""
        return self.run.status if self.run is not None else "lost" if self.has_ended else "not begun"

    @property
    def reason(self) -> str:
        """Why it didn't complete, in one line; if it did, why no cap was tested that was asked for, if so."""
        if self.run is None:
            return LOST if self.has_ended else ""
        return self.run.failure or self.run.untested


def settled(folder: Path, job: SweepJob) -> JobState:
    """Return how a job of the sweep in ``folder`` has ended.

    A job whose waiting process was killed is itself still ending, and says how in a moment; one that was lost on the
    way is marked so, and one that somebody may still be at is left alone.
    """
    until = time.monotonic() + _PATIENCE
    while (record := find_record(folder / job.folder, job.overrides)) is not None and record.run.status == "running":
        if time.monotonic() > until:
            _give_up(record)
            break
        time.sleep(_MOMENT)
    return JobState(record.run if record is not None else None, has_ended=True)


def _give_up(record: RunRecord) -> None:
    with suppress(StorageError):  # a disk that is full: the table has it all the same
        if not may_be_at_work(record.path.parent):
            record.finish("failed", error=KilledError(LOST))


def show_sweep(console: Console, folder: Path, sweep: SweepRecord, ended: Collection[int]) -> None:
    """Print the closing table of the sweep in ``folder``; of each job's overrides those that not all have.

    Of the jobs whose numbers have ``ended`` one without a record was lost; another hasn't begun.
    """
    states = {job.number: settled(folder, job) if job.number in ended else begun(folder, job) for job in sweep.jobs}
    leading = _leading([state.run for state in states.values() if state.run is not None])
    numbers = ["job", *(metric.title or metric.name for metric in leading), "host peak"]
    headings = ["job", "overrides", "status", *numbers[1:], "measured", "reason", "folder"]
    folded = ("overrides", "measured", "reason", "folder")
    table = plain_table([(title, title in numbers) for title in headings], folded=folded)
    own = own_overrides(sweep.jobs)
    for job in sorted(sweep.jobs, key=lambda job: job.number):
        cells = _cells(states[job.number], leading)
        table.add_row(str(job.number), escape(own[job.number]), *cells, escape(job.folder))  # in that of the line below
    console.print(table)
    count = Counter(state.status for state in states.values())
    console.print(f"\n{describe_counts(count)}, {escape(shorten(folder))}")
    goes_on = sweep.foreseen or count["interrupted"]  # a search takes failures as told
    if goes_on and count["completed"] < len(states):
        console.print(escape(f"to run what isn't completed: {resume_command(Path(shorten(folder)))}"))


def describe_counts(count: Mapping[str, int]) -> str:
    """Return how many jobs have which status, in words: ``2 of 12 completed, 1 interrupted, 9 not begun``."""
    others = [f"{number} {status}" for status, number in count.items() if number and status != "completed"]
    return ", ".join([f"{count.get('completed', 0)} of {sum(count.values())} completed", *others])


def begun(folder: Path, job: SweepJob) -> JobState:
    """Return how far a job of the sweep in ``folder`` is that hasn't ended, as far as is known here."""
    record = find_record(folder / job.folder, job.overrides)
    return JobState(record.run if record is not None else None, has_ended=False)


def _leading(runs: Sequence[Run]) -> list[Metric]:
    """Return the metrics that are shown of each job: those of its stages that lead, where any job has one."""
    tables = [metric_table(run) for run in runs if run.metrics]
    every = {name: metric for table in tables for name, metric in table.metrics.items() if metric.leads}
    return [each for name, each in every.items() if any(run.metric(name) is not None for run in runs)]


def _cells(state: JobState, leading: Sequence[Metric]) -> list[str]:
    """Return a job's status, the metrics that are ``leading``, host peak, where they come from, and reason."""
    run = state.run
    peak = run.memory.measured.get("cpu") if run is not None else None
    values = [(run.metric(metric.name) if run is not None else None, metric.unit) for metric in leading]
    return [
        f"[{COLOURS.get(state.status, 'red')}]{escape(state.status)}[/]",
        *("" if value is None else escape(tell(value, unit)) for value, unit in values),
        tell(peak, "bytes") if peak else "",
        _figures(run) if run is not None else "",
        escape(state.reason),
    ]


def _figures(run: Run) -> str:
    """Return whether the job measured its metrics itself, how often, and whether others used the processor then."""
    if run.status != "completed" or not run.memory.measured:
        return ""
    provenance = run.provenance
    return provenance.describe() + f", {provenance.contended} contended" * bool(provenance.contended)
