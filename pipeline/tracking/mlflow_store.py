"""Runs in MLflow: in a database in a folder of this machine, or by a server.

Used in a process of its own (``offstage.pipeline.tracking.store_process``), which ends with whatever the library
raises.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from offstage.pipeline.tracking.options import TrackerConfig
from offstage.pipeline.tracking.tracked_run import TrackedRun

Item = TypeVar("Item")

STATUSES: Mapping[str, str] = {"completed": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
"""What MLflow calls how a run ended."""
_PATIENCE = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
}
"""How long the library waits for a server that doesn't answer, unless the environment says so; by itself, an hour."""
_MOST_PARAMS, _MOST_POINTS = 100, 500
"""What one request may have."""
_LONGEST_NAME, _LONGEST_PARAM, _LONGEST_TAG = 250, 500, 5000
_UNFIT = re.compile(r"[^\w\-./ :]")
_PARENT, _NOTES, _COMMIT, _SOURCE = (
    "mlflow.parentRunId", "mlflow.note.content", "mlflow.source.git.commit", "mlflow.source.name",
)  # fmt: skip


class MlflowStore:
    """The experiment that ``tracker`` names, made if it isn't there."""

    def __init__(self, tracker: TrackerConfig) -> None:
        os.environ.update({name: value for name, value in _PATIENCE.items() if name not in os.environ})
        from mlflow import MlflowClient

        if tracker.uri is None:
            folder = Path(str(tracker.folder))
            folder.mkdir(parents=True, exist_ok=True)
            self._client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
            artifacts = str(folder / "artifacts")
        else:
            self._client, artifacts = MlflowClient(tracker.uri), None
        self._experiment = self._find_or_make(tracker.experiment, artifacts)

    def _find_or_make(self, name: str, artifacts: str | None) -> str:
        """Return the id of the experiment of that ``name``. Another process may make it first."""
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name, artifact_location=artifacts))
            except MlflowException:
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)

    def begin(self, name: str, *, started: int, parent: str | None = None) -> str:
        """Return the id of a new run that goes on, below ``parent`` if there is one."""
        tags = {_SOURCE: "offstage", **({_PARENT: parent} if parent else {})}
        run = self._client.create_run(self._experiment, start_time=started, tags=tags, run_name=name)
        return str(run.info.run_id)

    def reopen(self, run: str) -> None:
        """Have a run that had ended go on."""
        self._client.update_run(run, status="RUNNING")

    def log(self, run: str, told: TrackedRun, *, done: Callable[[str], object]) -> None:
        """Log all that is ``told`` of ``run``, say what is ``done``, and end it. Logging it twice changes nothing."""
        from mlflow.entities import Metric, Param

        params = [Param(_name(name), value[:_LONGEST_PARAM]) for name, value in told.params.items()]
        for portion in _portions(params, _MOST_PARAMS):
            self._client.log_batch(run, params=portion)
        done("parameters")
        points = [Metric(_name(point.name), point.value, point.when, point.step) for point in told.points]
        for several in _portions(points, _MOST_POINTS):
            self._client.log_batch(run, metrics=several)
        done("metrics")
        self._tag(run, told.tags, notes=told.notes)
        done("tags")
        self._client.set_terminated(run, status=STATUSES[told.status], end_time=told.ended)
        done("status")
        self._keep(run, told.files)
        done("files")

    def note(self, run: str, notes: str | None) -> None:
        """Have ``run`` show ``notes``, if there are any."""
        self._tag(run, {}, notes=notes)

    def end_parent(self, run: str, *, status: str, tags: Mapping[str, str], files: Path) -> None:
        """End the run of a sweep, with all ``files`` of a folder."""
        self._tag(run, tags, notes=None)
        self._client.set_terminated(run, status=STATUSES[status], end_time=round(time.time() * 1000))
        self._keep(run, sorted(files.iterdir()))

    def _tag(self, run: str, tags: Mapping[str, str], *, notes: str | None) -> None:
        from mlflow.entities import RunTag

        named = {_name(name): value for name, value in tags.items()}
        named |= {_NOTES: notes} if notes else {}
        named |= {_COMMIT: tags["git_commit"]} if "git_commit" in tags else {}
        every = [RunTag(name, value[:_LONGEST_TAG]) for name, value in named.items()]
        for portion in _portions(every, _MOST_PARAMS):
            self._client.log_batch(run, tags=portion)

    def _keep(self, run: str, files: Sequence[Path]) -> None:
        for file in files:
            self._client.log_artifact(run, str(file))


def _name(name: str) -> str:
    """Return ``name`` as MLflow takes one."""
    return _UNFIT.sub("_", name)[:_LONGEST_NAME]


def _portions(every: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    for begin in range(0, len(every), size):
        yield every[begin : begin + size]
