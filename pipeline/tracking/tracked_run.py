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

from offstage.pipeline.errors import StorageError
from offstage.pipeline.plain_data import leaves
from offstage.pipeline.provenance import provenance
from offstage.pipeline.record import RECORD, RunRecord
from offstage.pipeline.regular_files import read_object
from offstage.pipeline.stage import model_name
from offstage.pipeline.tracking.options import TrackerConfig, read_tracker
from offstage.pipeline.typed_config import type_faults

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
        data, ended = record.data, _milliseconds(record.data["finished"] or record.data["started"])
        return cls(
            name=run_name(record.path.parent),
            mark=_mark(record.path.parent, data["started"]),
            status=data["status"],
            started=_milliseconds(data["started"]),
            ended=ended,
            params={name: str(value) for name, value in leaves(record.config)},
            points=(
                *(MetricPoint(name, value, ended) for name, value in metrics(data).items()),
                *_sample_points(data, ended),
                *_step_points(data, ended),
            ),
            tags=dict(_tags(record, host)),
            notes=read_tracker(record.config).notes,
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


def tracked_records(sweep: Path) -> Iterator[RunRecord]:
    """Yield the records below ``sweep`` of jobs that go to MLflow, by what they say themselves."""
    for path in sorted(sweep.glob(f"**/{RECORD}")):
        try:
            record = RunRecord.load(path)
        except StorageError:
            continue
        config = record.data.get("config")
        node = config.get("tracker") if isinstance(config, Mapping) else None
        if isinstance(node, Mapping) and node.get("kind") == "mlflow" and not list(type_faults(TrackerConfig, node)):
            yield record


def metrics(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record: its metrics, each stage's seconds, memory by kind and device."""
    found = dict(record["metrics"])
    found |= {f"seconds/{stage['name']}": stage["seconds"] for stage in record["stages"]}
    for kind, devices in record["memory"].items():
        found |= {f"memory/{kind}/{device}": count for device, count in devices.items()}
    return dict(_numbers(found))


def _numbers(found: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in found.items():
        if isinstance(value, int | float) and math.isfinite(value):
            yield name, float(value)


def _sample_points(record: Mapping[str, Any], ended: int) -> Iterator[MetricPoint]:
    """Yield the metrics of each sample that counts for the figures, each at the time when it was measured."""
    counting = [sample for sample in record.get("samples", ()) if sample.get("counts")]
    for step, sample in enumerate(counting, start=1):
        when = _milliseconds(sample["measured"]) if sample.get("measured") else ended
        for name, value in _numbers(sample["metrics"]):
            yield MetricPoint(f"sample/{name}", value, when, step)


def _step_points(record: Mapping[str, Any], ended: int) -> Iterator[MetricPoint]:
    """Yield what is known of each step of a training: loss, norm of the gradient, seconds, bytes held by device."""
    for step, told in enumerate(record.get("steps", ()), start=1):
        flat = {f"step/{name.replace('.', '/')}": value for name, value in leaves(told)}
        for name, value in _numbers(flat):
            yield MetricPoint(name, value, ended, step)


def _tags(record: RunRecord, host: str | None) -> Iterator[tuple[str, str]]:
    """Yield what runs are found and told apart by: what was asked for, where it ran, and how each stage ended."""
    data, config = record.data, record.config
    found = provenance(data)
    error = data["error"] or {}
    told = {
        "overrides": " ".join(data["overrides"]),
        "checkpoint": model_name(config),
        "status": data["status"],
        "cached": str(found.is_cached).lower() if data["stages"] else "",
        "figures": found.told() if data["stages"] else "",
        "busy_samples": str(found.busy) if found.busy else "",
        "host": host,
        "git_commit": data["environment"].get("git_commit"),
        "error": ": ".join(filter(None, (error.get("stage"), error.get("type"), error.get("message")))),
        **{f"stage/{name}": status for name, status in _stage_statuses(record)},
    }
    yield from ((name, str(value)) for name, value in told.items() if value)


def _stage_statuses(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield how each stage of the run ended: done, cached, measured (again, though it was cached), or how it failed."""
    data, names = record.data, list(record.config.get("stages") or ())
    done = {stage["name"]: stage for stage in data["stages"]}
    last = record.config.get("stop_after")
    for name in names[: names.index(last) + 1] if last in names else names:
        if (data["error"] or {}).get("stage") == name:
            yield name, data["status"]
        elif name not in done:
            yield name, "not begun"
        else:
            stage = done[name]
            yield name, "measured" if stage.get("measured") else "cached" if stage["cached"] else "done"


def _milliseconds(when: str) -> int:
    return round(datetime.fromisoformat(when).timestamp() * 1000)
