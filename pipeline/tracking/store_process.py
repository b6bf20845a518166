"""The process in which MLflow or Trackio works: it logs a run by its record, or asks whether a store takes one.

A library of 170 MB is no part of what waits for a sweep's jobs then, nor of what is measured. It exits with 1 where it
failed, and its last words say why.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from offstage.pipeline.errors import StorageError, foreign
from offstage.pipeline.record import RunRecord
from offstage.pipeline.tracking.mlflow_store import HURRY, PATIENCE, MlflowStore, end_sweep, require_server
from offstage.pipeline.tracking.options import TrackerConfig, usable_tracker
from offstage.pipeline.tracking.tracked_run import TrackedRun, run_name


def main() -> None:
    """Do what the command line asks for, then exit: with 1 where it failed."""
    parser = ArgumentParser(prog="offstage")
    parser.add_argument("folder", type=Path, nargs="?", help="a run that has ended here, to be logged; or a sweep")
    parser.add_argument("sweep", type=Path, nargs="?", help="the one that the run belongs to")
    parser.add_argument(
        "--tracker", metavar="KEYS", help="ask this one whether it takes runs; has that of the sweep there"
    )
    parser.add_argument("--end", type=int, metavar="JOBS", help="of the sweep there: log what isn't, and end its run")
    given = parser.parse_args()
    is_asked = given.tracker is not None and given.end is None
    os.environ.update(HURRY if is_asked else {**PATIENCE, **os.environ})
    try:
        with foreign(StorageError, ""):
            _act(given)
    except StorageError as error:
        sys.stderr.write("\n" + " ".join(str(error).removeprefix(": ").split()) + "\n")
        sys.exit(1)


def _act(given: Namespace) -> None:
    if given.tracker is None:
        _log(given.folder, given.sweep)
        return
    tracker = TrackerConfig(**json.loads(given.tracker))
    if given.end is not None:
        end_sweep(given.folder, tracker, jobs=given.end)
        return
    if tracker.uri is not None:
        require_server(tracker.uri, tracker.experiment)
    if given.folder is not None:
        MlflowStore(tracker).begin_sweep(given.folder)


def _log(folder: Path, sweep: Path | None) -> None:
    record = RunRecord.load(folder)
    tracker, tracked = usable_tracker(record.config), TrackedRun.of(record, host=platform.node())
    if tracker is None:
        raise StorageError(f"{record.path} names no tracker that can be used here")
    if tracker.kind == "trackio":
        _log_to_trackio(tracked, tracker, group=run_name(sweep) if sweep else None)
        return
    store = MlflowStore(tracker)
    store.log(tracked, parent=store.sweep_run(sweep) if sweep else None)


def _log_to_trackio(tracked: TrackedRun, tracker: TrackerConfig, *, group: str | None) -> None:
    """Log the ``tracked`` run: the numbers of it all in one step, then those that have steps of their own."""
    os.environ["TRACKIO_DIR"] = str(tracker.folder)  # read when the library is imported
    trackio: Any = importlib.import_module("trackio")
    notes = {"notes": tracked.notes} if tracked.notes else {}
    trackio.init(
        project=tracker.experiment, name=tracked.name, group=group, config={**tracked.params, **tracked.tags, **notes}
    )
    steps: dict[int, dict[str, Any]] = {0: {"status": tracked.status, "provenance": tracked.tags.get("provenance")}}
    for point in tracked.points:
        steps.setdefault(point.step, {})[point.name] = point.value
    for step, values in sorted(steps.items()):
        trackio.log(values, step=step)
    trackio.finish()
