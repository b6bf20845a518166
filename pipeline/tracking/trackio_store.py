"""Runs in Trackio: in a database in a folder of this machine, those of a sweep in one group."""

from __future__ import annotations

import importlib
import os
from typing import Any

from offstage.pipeline.tracking.options import TrackerConfig
from offstage.pipeline.tracking.tracked_run import TrackedRun


def log_to_trackio(told: TrackedRun, tracker: TrackerConfig, *, group: str | None) -> None:
    """Log what is ``told`` of a run: the numbers of it all in one step, then those that have steps of their own."""
    os.environ["TRACKIO_DIR"] = str(tracker.folder)  # read when the library is imported
    trackio: Any = importlib.import_module("trackio")
    notes = {"notes": told.notes} if told.notes else {}
    trackio.init(project=tracker.experiment, name=told.name, group=group, config={**told.params, **told.tags, **notes})
    steps: dict[int, dict[str, Any]] = {0: {"status": told.status, "figures": told.tags.get("figures")}}
    for point in told.points:
        steps.setdefault(point.step, {})[point.name] = point.value
    for step, values in sorted(steps.items()):
        trackio.log(values, step=step)
    trackio.finish()
