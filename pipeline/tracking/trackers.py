"""Trackers: a run's record, logged through MLflow or Trackio as well, to a store on this machine or by a server.

It happens after the run, in a process of its own, so that a tracker's memory is no part of what was measured. A server
that isn't there is an error before any work; one that goes away later is a warning: the record is there.
"""

from __future__ import annotations

import json
import logging
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

from offstage.pipeline.errors import StorageError
from offstage.pipeline.process_setup import own_command
from offstage.pipeline.stage import Config
from offstage.pipeline.tracking.options import TrackerConfig, usable_tracker

PATIENCE_SECONDS = 120.0
"""How long a store is given for all that one process does."""

_log = logging.getLogger("offstage")


def require_tracker(tracker: TrackerConfig, sweep: Path | None = None) -> None:
    """Raise ``StorageError`` where the store of ``tracker`` takes no run; have one there for the ``sweep``."""
    error = _in_process(_told(tracker), *([str(sweep)] if sweep else []))
    if error is not None:
        key = "uri" if tracker.uri else "folder"
        raise StorageError(f"tracker.{key}: {tracker.store!r} takes no run: {error}; mend it, or give tracker=none")


def track(tracker: TrackerConfig, folder: Path, *, sweep: Path | None = None) -> None:
    """Log the run in ``folder`` to the ``tracker`` that its config names, below its ``sweep`` if it has one.

    What can't be logged is a warning.
    """
    error = _in_process(str(folder), *([str(sweep)] if sweep else []))
    if error is not None:
        _log.warning(
            "tracker=%s: %s: not tracked, or not all of it (%s); the run itself is in %s",
            tracker.kind, tracker.store, error, folder,
        )  # fmt: skip


class SweepTracking:
    """Has a run in each store that stands above those of a sweep's jobs, before the first of them begins.

    The stores are those of the jobs' configs: what a record in the sweep's folder says isn't asked.
    """

    def __init__(self, sweep: Path) -> None:
        self._sweep = sweep
        self._begun: set[TrackerConfig] = set()
        self._stores: set[TrackerConfig] = set()

    def begin(self, configs: Iterable[Config], *, done: Iterable[Config] = ()) -> None:
        """Begin with the jobs that have these ``configs``; others were ``done`` before.

        Raises ``StorageError`` where a store can't take it.
        """
        given = _mlflow_trackers(configs)
        for tracker in sorted(given - self._begun, key=repr):
            require_tracker(tracker, self._sweep)
            self._begun.add(tracker)
        self._stores |= {replace(tracker, notes=None) for tracker in given | _mlflow_trackers(done)}

    def end(self, *, jobs: int) -> None:
        """End the sweep's runs, whatever ended its ``jobs``; those that aren't logged yet are now."""
        for tracker in sorted(self._stores, key=repr):
            error = _in_process(_told(tracker), f"--end={jobs}", str(self._sweep))
            if error is not None:
                _log.warning(
                    "tracker: the run of the sweep isn't ended (%s); the sweep itself is in %s", error, self._sweep
                )


def _mlflow_trackers(configs: Iterable[Config]) -> set[TrackerConfig]:
    given = (usable_tracker(config) for config in configs)
    return {tracker for tracker in given if tracker is not None and tracker.kind == "mlflow"}


def _told(tracker: TrackerConfig) -> str:
    return f"--tracker={json.dumps(asdict(tracker))}"


def _in_process(*arguments: str) -> str | None:
    """Have a process of its own do what ``arguments`` say, and return why it couldn't, null where it could.

    Whatever a server or a library does, it takes no longer than there is patience, and it raises nothing.
    """
    command = own_command("tracker", *arguments)
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=PATIENCE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no end within {PATIENCE_SECONDS:.0f} s"
    except OSError as error:
        return str(error)
    _log.debug("tracker: %s", process.stderr)
    words = process.stderr.strip() if process.returncode == 1 else ""
    ended = f"its process ended with code {process.returncode}"
    return (words.splitlines() or [ended])[-1] if process.returncode else None
