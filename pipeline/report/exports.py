"""``report.csv`` and ``report.json``, every number raw for other tools, and ``report.tex``, the table for a paper."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pandas

from offstage.pipeline.decoding import encode
from offstage.pipeline.installed_stages import metric_table
from offstage.pipeline.plain_data import as_json as json_text
from offstage.pipeline.replay import MEMORY
from offstage.pipeline.report.checkpoint_groups import CheckpointGroup
from offstage.pipeline.report.comparison import RunComparison
from offstage.pipeline.report.differences import Spread
from offstage.pipeline.report.noise import LEVEL
from offstage.pipeline.report.quantities import in_tier_order
from offstage.pipeline.report.run_folders import Job
from offstage.pipeline.report.summary import Summary
from offstage.pipeline.run_schema import Output, RunError

SCHEMA_VERSION = 5
_SECTIONS = (
    "status", "error", "overrides", "model", "memory", "metrics", "experts", "steps", "repeats", "hosts", "layers",
)  # fmt: skip
"""What of a record stands in the report as it stands there."""
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")
_FORMULA = re.compile(r"\s*[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
"""How a cell begins that a spreadsheet would compute: those signs, in their full width too, and what it skips."""


def as_csv(summary: Summary) -> str:
    """Return one row a job, bytes and seconds as the records have them; what isn't known is empty.

    A text that a spreadsheet would take for a formula begins with an apostrophe.
    """
    settings = {f"config.{entry.key}": entry.by_job for entry in summary.differences}
    rows = [{name: defused(value) for name, value in _row(job, settings).items()} for job in summary.jobs]
    csv: str = pandas.DataFrame(rows, columns=_names(rows), dtype=object).to_csv(index=False, lineterminator="\n")
    return csv


def as_latex(summary: Summary) -> str:
    """Return the table of jobs as the page has it, each heading with its unit, for a paper."""
    heads = [f"{column.title}, {column.unit}" if column.unit else column.title for column in summary.table]
    sides = "".join("r" if column.numeric else "l" for column in summary.table)
    rows = zip(*(column.cells for column in summary.table), strict=True)
    table = pandas.DataFrame(rows, columns=heads)
    latex: str = table.to_latex(index=False, escape=True, column_format=sides)
    return latex


def _row(job: Job, settings: Mapping[str, Mapping[str, str]]) -> dict[str, object]:
    run = job.run
    row: dict[str, object] = {"job": job.name, "folder": run.folder, "status": run.status}
    error = run.error or RunError()
    row |= {"error_stage": error.stage or "", "error_type": error.type, "reason": run.reason}
    row |= {key: values[job.name] for key, values in settings.items() if job.name in values}
    for section in MEMORY:
        amounts = getattr(run.memory, section)
        row |= {f"{section}_bytes.{device}": amounts[device] for device in in_tier_order(amounts)}
    row |= {f"metrics.{name}": value for name, value in run.metrics.items()}
    row |= {"model.class": run.model.class_name, "model.parameters": run.model.count}
    row["provenance"] = run.provenance.describe() if run.memory.measured else ""
    for stage in run.stages:
        row |= {f"seconds.{stage.name}": stage.seconds, f"cached.{stage.name}": stage.cached}
    return row


def defused(value: object) -> object:
    """Return ``value`` as no spreadsheet computes it: records come from elsewhere, and may say anything."""
    text = str(value)
    return f"'{text}" if _FORMULA.match(text) and not _NUMBER.fullmatch(text) else value


def _names(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the names of all columns, those of one kind side by side."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    kinds = list(dict.fromkeys(name.partition(".")[0] for name in names))
    return sorted(names, key=lambda name: kinds.index(name.partition(".")[0])) or ["job"]


def as_json(summary: Summary) -> str:
    """Return the whole report but the pictures."""
    content = {
        "schema_version": SCHEMA_VERSION,
        "jobs": [_job(job) for job in summary.jobs],
        "unreadable": [{"path": str(problem.path), "reason": problem.reason} for problem in summary.problems],
        "conditions": _spreads(summary.conditions),
        "failures": [{"job": job.name, "reason": job.run.failure} for job in summary.jobs if job.run.failure],
        "config_differences": _spreads(summary.differences),
        "noise": {**asdict(summary.noise), "within": summary.noise.within, "level": LEVEL},
        "checkpoints": [_group(group) for group in summary.groups],
    }
    return json_text(content, indent=1)


def _group(group: CheckpointGroup) -> dict[str, Any]:
    return {
        "checkpoint": group.title,
        "jobs": [job.name for job in group.jobs],
        "seconds_per_token_by_budget": [asdict(series) for series in group.series],
        "pareto_front": [asdict(point) for point in group.front.best],
        "answers": [
            {"jobs": list(names), "outputs": [_output(output) for output in job.run.outputs]}
            for job, names in group.answers
        ],
    }


def _output(output: Output) -> dict[str, Any]:
    told = {"prompt": output.title, "text": output.description}
    return {**told, "token_ids": output.token_ids or (), "prompt_tokens": output.prompt_tokens}


def _job(job: Job) -> dict[str, Any]:
    run, table = job.run, metric_table(job.run)
    return {
        "job": job.name,
        "folder": str(run.folder),
        "reason": run.reason,
        "provenance": run.provenance.describe() if run.memory.measured else None,
        **{section: encode(getattr(run, section)) for section in _SECTIONS},
        "units": {name: table.unit(name, value) for name, value in run.metrics.items() if not isinstance(value, str)},
        "stages": [{"name": stage.name, "seconds": stage.seconds, "cached": stage.cached} for stage in run.stages],
    }


def _spreads(entries: Sequence[Spread]) -> list[dict[str, Any]]:
    return [
        {"key": entry.key, "values": [{"value": value, "jobs": list(jobs)} for value, jobs in entry.values]}
        for entry in entries
    ]


def comparison_json(comparison: RunComparison) -> str:
    """Return what changed between two runs."""
    content = {
        "schema_version": SCHEMA_VERSION,
        "a": str(comparison.before),
        "b": str(comparison.after),
        **{
            section.title.lower(): {"changes": [asdict(each) for each in section.changes], "notes": list(section.notes)}
            for section in comparison.sections
        },
    }
    return json_text(content, indent=1)
