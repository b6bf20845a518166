"""What a tracker is told of a run: everything that its record has and a tracker has a place for."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from offstage.pipeline.decoding import encode
from offstage.pipeline.plain_data import leaves
from offstage.pipeline.record import RunRecord
from offstage.pipeline.regular_files import read_object
from offstage.pipeline.run_schema import Run, RunError
from offstage.pipeline.stage import model_name
from offstage.pipeline.tracking.options import read_tracker

_LOG_NAME = "run.log"
_SWEEP = "sweep.json"


@dataclass(frozen=True, slots=True)
class MetricPoint:
    """A number by its name; of one that is told several times ``step`` says which time it is, from 1 on.

    ``when`` is the time in milliseconds since 1970.
    """

    name: str
    value: float
    when: int
    step: int = 0


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run that has ended, between ``started`` and ``ended``, in milliseconds since 1970.

    ``status`` is the record's. By its ``mark`` it is found again in a store. A tracker cuts what is too long for it.
    """

    name: str
    mark: str
    status: str
    started: int
    ended: int
    params: Mapping[str, str]
    points: tuple[MetricPoint, ...]
    tags: Mapping[str, str]
    notes: str | None
    files: tuple[Path, ...]

    @classmethod
    def of(cls, record: RunRecord, *, host: str | None = None) -> TrackedRun:
        """Return what is told of the run of ``record``, on the machine of the name ``host`` if that is known."""
        run, began = record.run, record.run.started or ""
        ended = _milliseconds(run.finished or began)
        return cls(
            name=run_name(run.folder),
            mark=_mark(run.folder, began),
            status=run.status,
            started=_milliseconds(began),
            ended=ended,
            params={name: str(value) for name, value in leaves(run.config)},
            points=(
                *(MetricPoint(name, value, ended) for name, value in metrics(run).items()),
                *_repeat_points(run, ended),
                *_step_points(run, ended),
            ),
            tags=dict(_tags(run, host)),
            notes=read_tracker(run.config).notes,
            files=tuple(file for file in (record.path, record.path.with_name(_LOG_NAME)) if file.is_file()),
        )


def run_name(folder: Path) -> str:
    """Return what the run in ``folder``, or the sweep, is called: the last two parts of its path."""
    return f"{folder.parent.name}/{folder.name}"


def sweep_mark(sweep: Path) -> str:
    """Return what the run of ``sweep`` is found by in a store: its folder, and which user's command it is.

    On another machine, with a server in common, the same folder may hold another sweep.
    """
    try:
        signature = read_object(sweep / _SWEEP).get("signature")
    except (OSError, ValueError):
        signature = None
    return _mark(sweep, hashlib.sha256(str(signature).encode()).hexdigest()[:16])


def _mark(folder: Path, began: str) -> str:
    """Return the name of ``folder`` and what tells its runs apart, with nothing in it that ends a quoted text."""
    return f"{quote(os.fsencode(folder.resolve()))}@{quote(began, safe=':+')}"


def metrics(run: Run) -> dict[str, float]:
    """Return the numbers of a run: its metrics, each stage's seconds, memory by kind and device."""
    numbers: dict[str, Any] = {**run.metrics, **{f"seconds/{stage.name}": stage.seconds for stage in run.stages}}
    for kind, devices in encode(run.memory).items():
        numbers |= {f"memory/{kind}/{device}": count for device, count in devices.items()}
    return dict(_numbers(numbers))


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, int | float) and math.isfinite(value):
            yield name, float(value)


def _repeat_points(run: Run, ended: int) -> Iterator[MetricPoint]:
    """Yield the metrics of each repeat that counts, each at the time when it was measured."""
    for step, repeat in enumerate(run.counting, start=1):
        when = _milliseconds(repeat.measured) if repeat.measured else ended
        for name, value in _numbers(repeat.metrics):
            yield MetricPoint(f"repeat/{name}", value, when, step)


def _step_points(run: Run, ended: int) -> Iterator[MetricPoint]:
    """Yield what is known of each step of a training: loss, norm of the gradient, seconds, bytes held by device."""
    for number, step in enumerate(run.steps, start=1):
        flat = {f"step/{name.replace('.', '/')}": value for name, value in leaves(step.whole)}
        for name, value in _numbers(flat):
            yield MetricPoint(name, value, ended, number)


def _tags(run: Run, host: str | None) -> Iterator[tuple[str, str]]:
    """Yield what runs are found and told apart by: what was asked for, where it ran, and how each stage ended."""
    provenance, error = run.provenance, run.error or RunError()
    tags = {
        "overrides": " ".join(run.overrides),
        "checkpoint": model_name(run.config),
        "status": run.status,
        "cached": str(provenance.is_cached).lower() if run.stages else "",
        "provenance": provenance.describe() if run.stages else "",
        "contended_repeats": str(provenance.contended) if provenance.contended else "",
        "host": host,
        "git_commit": run.environment.get("git_commit"),
        "error": ": ".join(filter(None, (error.stage, error.type, error.message))),
        **{f"stage/{name}": status for name, status in _stage_statuses(run)},
    }
    yield from ((name, str(value)) for name, value in tags.items() if value)


def _stage_statuses(run: Run) -> Iterator[tuple[str, str]]:
    """Yield how each stage of the run ended: done, cached, measured (again, though it was cached), or how it failed."""
    names, last = list(run.config.get("stages") or ()), run.config.get("stop_after")
    for name in names[: names.index(last) + 1] if last in names else names:
        stage = run.stage(name)
        if run.error is not None and run.error.stage == name:
            yield name, run.status
        elif stage is None:
            yield name, "not begun"
        else:
            yield name, "measured" if stage.measured else "cached" if stage.cached else "done"


def _milliseconds(when: str) -> int:
    return round(datetime.fromisoformat(when).timestamp() * 1000)
