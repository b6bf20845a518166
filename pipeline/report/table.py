"""The table of jobs: one column a fact, each in one unit, for the terminal and the page alike.

Why a job didn't complete isn't in it: that is told beside it, once for all jobs with the same reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal

from offstage.pipeline.installed_stages import metric_table
from offstage.pipeline.metrics import Metric, MetricTable, Unit
from offstage.pipeline.report.differences import ABSENT, Spread
from offstage.pipeline.report.noise import SECONDS, Noise, token_times, told_repeats
from offstage.pipeline.report.quantities import MISSING, in_tier_order, linked_devices, listed, scale_for, shorten
from offstage.pipeline.report.run_folders import Job
from offstage.pipeline.report.speed import DISK
from offstage.pipeline.run_schema import Bytes, HostRun, Number, Run

UNLIMITED = "unlimited"
_UNLIMITED_BYTES = 2.0**63
"""What a budget without a limit is sorted by: more than any that a record has."""
PASSES, TOKENS_A_PASS = "passes", "tokens_per_pass"
_LONGEST = 600
"""So many characters of a cell are kept: a prompt may have thousands, and the table has it once for each job."""
_OF_CHECKPOINT = ("model.kind", "model.path", "model._target_")


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its ``title``, the ``unit`` of its numbers (empty for text), and a cell for every job.

    ``values`` are the numbers that the cells tell, by which jobs are sorted. Jobs can be picked by the words of a
    column that ``sets_apart``. A screen too narrow for all columns leaves out what is a ``detail``: what stands aside
    first, then other metrics that don't lead.
    """

    title: str
    unit: str
    cells: tuple[str, ...]
    numeric: bool = False
    values: tuple[Number | None, ...] = ()
    sets_apart: bool = False
    detail: Literal["", "more", "aside"] = ""


def job_table(
    jobs: Sequence[Job], differences: Sequence[Spread], within: Noise, *, checkpoints: Mapping[str, str] | None = None
) -> tuple[Column, ...]:
    """Return the columns of the table of jobs; one that has nothing to say about any job is left out.

    ``within`` says which jobs can't be told apart; ``checkpoints`` has the name of each job's, where there are several.
    """
    tables = {id(table): table for table in (metric_table(job.run) for job in jobs)}  # most are one and the same
    budgets, table = _budgets(jobs), reduce(MetricTable.joined, tables.values(), MetricTable({}))
    shown = {f"max_memory.{column.title.removeprefix('budget ')}" for column in budgets}
    shown |= set(_OF_CHECKPOINT if checkpoints else ())
    columns = [
        Column("job", "", tuple(job.name for job in jobs)),
        Column("status", "", tuple(_status(job.run) for job in jobs), sets_apart=True),
        Column("checkpoint", "", tuple((checkpoints or {}).get(job.name, MISSING) for job in jobs), sets_apart=True),
        *(_setting(jobs, entry) for entry in differences if entry.key not in shown),
        *budgets,
        _numbers("memory cap", "bytes", [job.run.enforcement.bytes if job.run.enforcement else None for job in jobs]),
        *_metrics(jobs, table),
        *_repeats(jobs, within, table),
        *_links(jobs, table),
        *_peaks(jobs),
    ]
    filled = [column for column in columns if set(column.cells) - {MISSING}]
    return tuple(replace(column, cells=tuple(shorten(cell, _LONGEST) for cell in column.cells)) for column in filled)


def _metrics(jobs: Sequence[Job], table: MetricTable) -> list[Column]:
    """Return the columns of all that ``table`` has titles for; not of a prediction that came true in each job."""
    return [
        _metric(jobs, metric, metric.name)
        for row in table.rows()
        for metric in row
        if metric.kind != "predicted" or any(_came(job.run, metric.name) != _came(job.run, metric.of) for job in jobs)
    ]


def _came(run: Run, name: str) -> Number | str | None:
    """Return what ``run`` came to by the name of a metric.

    Where forwards share passes without drafts, how many tokens one of these gave isn't noted, and follows.
    """
    noted, passes = run.metrics.get(name), run.metric(PASSES)
    if name != TOKENS_A_PASS or noted is not None or not passes:
        return noted
    return sum(len(output.token_ids or ()) for output in run.outputs) / passes


def _metric(jobs: Sequence[Job], metric: Metric, name: str, *, before: str = "") -> Column:
    """Return the column of ``metric``, which records have under ``name``."""
    values = [_came(job.run, name) for job in jobs]
    numbers = [None if isinstance(value, str) else value for value in values]
    if metric.unit != "word":
        column = _numbers(before + metric.heading, metric.unit, numbers)
    else:
        words = tuple(MISSING if value is None else str(value) for value in values)
        column = Column(before + metric.heading, "", words, sets_apart=True)
    return replace(column, detail="aside" if metric.aside or before else "" if metric.leads else "more")


def _repeats(jobs: Sequence[Job], within: Noise, table: MetricTable) -> list[Column]:
    """Return the columns of how far the repeats of a token's time lie apart, how many there are, and of the noise."""
    times, of = [times if len(times := token_times(job)) > 1 else [] for job in jobs], table.find(SECONDS)
    title, unit = (of.title, of.unit) if of else ("", table.unit(SECONDS))
    columns = [
        _numbers(f"{title}, least", unit, [min(each, default=None) for each in times]),
        _numbers(f"{title}, largest", unit, [max(each, default=None) for each in times]),
        Column("repeats", "", tuple(told_repeats(job) or MISSING for job in jobs)),
    ]
    if within.pairs:
        cells = [listed(within.like[job.name]) or "none" if job.name in within.like else MISSING for job in jobs]
        columns.append(Column("within the noise of", "", tuple(cells)))
    return [replace(column, detail="aside") for column in columns]


def devices(jobs: Sequence[Job], bytes_of: Callable[[Run], Bytes]) -> list[str]:
    """Return every device but the disk that ``bytes_of`` has a number for, in the order of the tiers."""
    return [device for device in in_tier_order(name for job in jobs for name in bytes_of(job.run)) if device != DISK]


def _setting(jobs: Sequence[Job], entry: Spread) -> Column:
    by_job = entry.by_job
    values = [by_job.get(job.name, ABSENT) for job in jobs]
    return Column(entry.key, "", tuple(MISSING if one == ABSENT else one for one in values), sets_apart=True)


def _budgets(jobs: Sequence[Job]) -> list[Column]:
    """Return a column a device. A job that was refused has no budget in its record, so its config's word stands."""
    columns = []
    for device in devices(jobs, lambda run: run.memory.budget):
        words = [UNLIMITED if device in job.run.memory.budget else _given(job.run, device) for job in jobs]
        column = _numbers(f"budget {device}", "bytes", [job.run.memory.budget.get(device) for job in jobs])
        numbers = list(zip(column.values, column.cells, words, strict=True))
        cells = tuple(word if value is None else cell for value, cell, word in numbers)
        values = tuple(_UNLIMITED_BYTES if (value, word) == (None, UNLIMITED) else value for value, _, word in numbers)
        columns.append(replace(column, cells=cells, values=values))
    return columns


def _given(run: Run, device: str) -> str:
    asked = run.config.get("max_memory")
    return str(asked.get(device, MISSING)) if isinstance(asked, dict) else MISSING


def _peaks(jobs: Sequence[Job]) -> list[Column]:
    """Return the columns of the most that was held on each device, of runs over several hosts on those of each.

    Of hosts that were only planned for it is what is predicted.
    """
    peaks = {"": [job.run.memory.measured for job in jobs]}
    for host in range(max((len(job.run.hosts) for job in jobs), default=0)):
        hosts = [next(iter(job.run.hosts[host : host + 1]), HostRun()) for job in jobs]
        if host:  # the run itself is of host 0
            peaks[f"host {host}, "] = [each.memory.measured for each in hosts]
        peaks[f"host {host}, predicted "] = [{} if each.record else each.memory.predicted for each in hosts]
    return [
        _numbers(f"{before}peak {device}", "bytes", [amounts.get(device) for amounts in each])
        for before, each in peaks.items()
        for device in in_tier_order(name for amounts in each for name in amounts)
        if device != DISK
    ]


def _links(jobs: Sequence[Job], table: MetricTable) -> list[Column]:
    """Return a column for each metric of each link, where there are several."""
    return [
        _metric(jobs, metric, metric.on(device), before=f"to {device}, ")
        for device in linked_devices(table, (name for job in jobs for name in job.run.metrics))
        for metric in table.links()
    ]


def _numbers(title: str, unit: Unit, values: Sequence[Number | None]) -> Column:
    """Return a column of numbers, in the unit of that kind that suits them."""
    scale = scale_for(values, unit)
    return Column(title, scale.unit, tuple(map(scale.number, values)), numeric=True, values=tuple(values))


def _status(run: Run) -> str:
    """Return the status, and whether the metrics are an earlier run's, or of accelerators that aren't there.

    A cap that was asked for and not tested is said too.
    """
    hardware = run.config.get("hardware")
    simulated = isinstance(hardware, dict) and bool(hardware.get("devices"))
    cached = run.status == "completed" and run.provenance.is_cached
    untested = run.status == "completed" and bool(run.untested)
    return ", ".join([run.status, *["cached"] * cached, *["simulated"] * simulated, *["no cap tested"] * untested])
