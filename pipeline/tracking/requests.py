"""What a store is asked for: to log a run, and to begin and to end the run that stands above those of a sweep."""

from __future__ import annotations

import platform
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from offstage.pipeline.cache.locks import locked
from offstage.pipeline.errors import StorageError
from offstage.pipeline.record import RECORD, RunRecord
from offstage.pipeline.tracking.mlflow_store import MlflowStore
from offstage.pipeline.tracking.options import TrackerConfig, read_tracker
from offstage.pipeline.tracking.run_ids import FILE_NAME, RunId, find_id, note_id, note_whole, read_ids
from offstage.pipeline.tracking.tracked_run import TrackedRun, run_name
from offstage.pipeline.tracking.trackio_store import log_to_trackio

SWEEP_CONFIG = "multirun.yaml"
"""The file in which Hydra keeps what a sweep was asked for."""


def log_run(folder: Path, sweep: Path | None, *, done: Callable[[str], object]) -> None:
    """Log the run in ``folder``, which has just ended on this machine, below that of its ``sweep`` if it has one."""
    record = RunRecord.load(folder)
    tracker, told = read_tracker(record.config), TrackedRun.of(record, host=platform.node())
    if tracker.kind == "trackio":
        log_to_trackio(told, tracker, group=run_name(sweep) if sweep else None)
    else:
        store = MlflowStore(tracker)
        parent = _parent(store, sweep, tracker).run_id if sweep else None
        _log(store, folder, told, tracker, record=record, parent=parent, done=done)


def begin_sweep(sweep: Path, tracker: TrackerConfig) -> None:
    """Have the run of ``sweep`` there, going on: a new one, or that of the sweep that is resumed."""
    sweep.mkdir(parents=True, exist_ok=True)
    store = MlflowStore(tracker)
    store.reopen(_parent(store, sweep, tracker).run_id)


def end_sweep(sweep: Path, *, jobs: int) -> None:
    """Log those runs of ``sweep`` that aren't, because their processes were lost or the store was, and end its own.

    It is interrupted where not all of its ``jobs`` have ended.
    """
    for parent in read_ids(sweep):
        place = {"uri": parent.store} if "://" in parent.store else {"folder": parent.store}
        tracker = TrackerConfig(kind="mlflow", experiment=parent.experiment, **place)
        store, statuses = MlflowStore(tracker), Counter[str]()
        for record in _records(sweep, tracker):
            statuses[record.data["status"]] += 1
            told = TrackedRun.of(record)
            _log(store, record.path.parent, told, tracker, record=record, parent=parent.run_id, done=lambda part: None)
        statuses["not begun"] = max(0, jobs - statuses.total())
        tags = {"overrides": _overrides(sweep), "jobs": str(statuses.total()), "host": platform.node()}
        tags |= {f"jobs/{status}": str(count) for status, count in statuses.items()}
        ends = {"interrupted": ("interrupted", "not begun"), "failed": ("failed",)}
        worst = next((end for end, causes in ends.items() if any(statuses[cause] for cause in causes)), "completed")
        with tempfile.TemporaryDirectory() as kept:
            _write_report(sweep, Path(kept))
            store.end_parent(parent.run_id, status=worst, tags=tags, files=Path(kept))


def _parent(store: MlflowStore, sweep: Path, tracker: TrackerConfig) -> RunId:
    """Return the run of ``sweep``, made once, whoever of its jobs asks first."""
    with locked(sweep / FILE_NAME, work="makes the tracker's run of the sweep"):
        found = find_id(sweep, tracker)
        if found is None:
            run = store.begin(run_name(sweep), started=round(time.time() * 1000))
            found = RunId(tracker.store, tracker.experiment, run)
            note_id(sweep, found)
            store.note(run, tracker.notes)
    return found


def _log(
    store: MlflowStore, folder: Path, told: TrackedRun, tracker: TrackerConfig, *, record: RunRecord,
    parent: str | None, done: Callable[[str], object],
) -> None:  # fmt: skip
    """Log what is ``told`` of the run in ``folder``, unless it is logged; what was begun is gone on with."""
    started = record.data["started"]
    found = find_id(folder, tracker, started=started)
    if found is None:
        run = store.begin(told.name, started=told.started, parent=parent)
        found = RunId(tracker.store, tracker.experiment, run, started)
        note_id(folder, found)
    if not found.whole:
        store.log(found.run_id, told, done=done)
        note_whole(folder, found)


def _records(sweep: Path, tracker: TrackerConfig) -> Iterator[RunRecord]:
    """Yield the records of those jobs of ``sweep`` that go to ``tracker`` and have ended."""
    for path in sorted(sweep.glob(f"**/{RECORD}")):
        try:
            record = RunRecord.load(path)
        except StorageError:
            continue
        given = record.config.get("tracker") or {}
        place = (given.get("kind"), given.get("experiment"))
        if record.data["status"] != "running" and place == (tracker.kind, tracker.experiment):
            yield record


def _overrides(sweep: Path) -> str:
    """Return what was asked for on the command line of ``sweep``."""
    from omegaconf import OmegaConf

    try:
        asked: Mapping[str, Any] = OmegaConf.load(sweep / SWEEP_CONFIG).hydra.overrides
    except OSError:
        return ""
    return " ".join(map(str, asked["task"]))


def _write_report(sweep: Path, folder: Path) -> None:
    """Write the report's numbers of ``sweep`` into ``folder``, and what the sweep was asked for."""
    from offstage.pipeline.report.exports import as_csv, as_json
    from offstage.pipeline.report.run_folders import find
    from offstage.pipeline.report.summary import summarise

    summary = summarise(find([sweep]))
    for name, text in {"report.csv": as_csv(summary), "report.json": as_json(summary)}.items():
        (folder / name).write_text(text, encoding="utf-8", errors="replace")
