"""Trackers: a run's record, logged through MLflow or Trackio as well, to a store on this machine or by a server.

It happens after the run, in a process of its own, so that a tracker's memory is no part of what was measured. A server
that isn't there is an error before any work; one that goes away later is a warning: the record is there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from offstage.pipeline.errors import StorageError
from offstage.pipeline.stage import Config
from offstage.pipeline.tracking.options import TrackerConfig, usable_tracker
from offstage.pipeline.tracking.run_ids import find_id, read_ids
from offstage.pipeline.tracking.store_process import ask

_log = logging.getLogger("offstage")
_PARTS = ("parameters", "metrics", "tags", "status", "files")


def require_tracker(config: Config, *, sweep: Path | None = None) -> None:
    """Raise ``StorageError`` where the server that ``config`` names can't take a run; it is asked before any work.

    That of a ``sweep`` was asked before the first job: one that is away for a while costs none of the others.
    """
    given = usable_tracker(config)
    if given is not None and given.uri and (sweep is None or find_id(sweep, given) is None):
        _require_server(given)


def track(config: Config, folder: Path, *, sweep: Path | None = None) -> None:
    """Log the run in ``folder`` to the tracker that its ``config`` names, if any, below its ``sweep`` if it has one.

    What can't be logged is a warning.
    """
    given = usable_tracker(config)
    if given is None:
        return
    answer = ask({"act": "run", "run": str(folder), "sweep": str(sweep) if sweep else None})
    if answer.error is not None:
        left = [part for part in _PARTS if part not in answer.done] if answer.done else ["the run"]
        _log.warning(
            "tracker=%s: %s: not tracked: %s (%s); the run itself is in %s",
            given.kind, given.store, ", ".join(left), answer.error, folder,
        )  # fmt: skip


class SweepTracking:
    """Has a run there that stands above those of a sweep's jobs, before the first of them begins."""

    def __init__(self, sweep: Path) -> None:
        self._sweep = sweep
        self._begun: set[TrackerConfig] = set()

    def begin(self, configs: Iterable[Config]) -> None:
        """Begin with the jobs that have these ``configs``. Raises ``StorageError`` where a store can't take it."""
        given = {usable_tracker(config) for config in configs}
        for tracker in sorted(given - self._begun - {None}, key=repr):
            if tracker is not None:
                self._begin(tracker)
                self._begun.add(tracker)

    def _begin(self, tracker: TrackerConfig) -> None:
        if tracker.uri:
            _require_server(tracker)
        if tracker.kind != "mlflow":
            return
        answer = ask({"act": "begin", "sweep": str(self._sweep), "tracker": asdict(tracker)})
        if answer.error is not None:
            key = "uri" if tracker.uri else "folder"
            raise StorageError(
                f"tracker.{key}: {tracker.store!r} takes no run ({answer.error}); mend it, or give tracker=none"
            )


def end_sweep(sweep: Path, *, jobs: int) -> None:
    """End the run of ``sweep``, if it has one, whatever ended its ``jobs``; those that aren't logged yet are now."""
    if not read_ids(sweep):
        return
    answer = ask({"act": "end", "sweep": str(sweep), "jobs": jobs})
    if answer.error is not None:
        _log.warning("tracker: the run of the sweep isn't ended (%s); the sweep itself is in %s", answer.error, sweep)


def _require_server(tracker: TrackerConfig) -> None:
    from offstage.pipeline.tracking.server import require_server  # what it imports is for servers alone

    require_server(str(tracker.uri), tracker.experiment)
