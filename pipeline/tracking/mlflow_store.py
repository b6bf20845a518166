"""Runs in MLflow, by its own client: in a database in a folder of this machine, or by a server.

Used in a process of its own (``offstage.pipeline.tracking.store_process``). Which run of the store is that of a folder,
the store itself knows: by the tag ``offstage.run``. So a run is there once, however often it is logged.
"""

from __future__ import annotations

import platform
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from offstage.pipeline.errors import StorageError, causes, words_of
from offstage.pipeline.record import RECORD, RunRecord
from offstage.pipeline.tracking.options import TrackerConfig, usable_tracker
from offstage.pipeline.tracking.tracked_run import TrackedRun, run_name, sweep_mark

SWEEP_CONFIG = "multirun.yaml"
"""The file in which Hydra keeps what a sweep was asked for."""
STATUSES: Mapping[str, str] = {"completed": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
"""What MLflow calls how a run ended."""
_LONGEST_NAME, _LONGEST_PARAM, _LONGEST_TAG = 250, 500, 5000
_UNFIT = re.compile(r"[^\w\-./ :]")
_MARK, _WHOLE = "offstage.run", "offstage.logged"
_PARENT, _NOTES, _COMMIT, _SOURCE = (
    "mlflow.parentRunId", "mlflow.note.content", "mlflow.source.git.commit", "mlflow.source.name",
)  # fmt: skip
CHECK_SECONDS = 5
"""How long a server is given to answer before any work."""
HURRY = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": str(CHECK_SECONDS)}
PATIENCE = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
}
"""How long the library waits for a server that doesn't answer, unless the environment says so; by itself, an hour."""


def require_server(uri: str, experiment: str) -> None:
    """Ask the server at ``uri`` for ``experiment``, whether it has one or not.

    Raises ``StorageError`` where nothing answers in time, where what answers is no MLflow server, and where it refuses
    the credentials that the library finds, wherever it does.
    """
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    try:
        existing = MlflowClient(uri).get_experiment_by_name(experiment)
    except MlflowException as error:
        raise StorageError(_refusal(error)) from error
    if existing is not None and existing.name != experiment:
        raise StorageError("what answers is no MLflow server")
    if existing is not None and existing.lifecycle_stage == "deleted":
        raise StorageError(f"its experiment {experiment!r} was deleted; restore it, or give another tracker.experiment")


def _refusal(error: Any) -> str:
    """Return why a server gave MLflow's client an ``error``, without what its answer held."""
    *_, cause = causes(error)
    if isinstance(cause, OSError):
        return f"it can't be reached within {CHECK_SECONDS} s ({words_of(cause)})"
    said = words_of(error).partition(" Response body")[0]
    if error.get_http_status_code() in (401, 403):
        return f"it refuses the credentials that MLflow finds for it, as in MLFLOW_TRACKING_TOKEN ({said})"
    return f"what answers is no MLflow server, or one at fault ({said})"


class MlflowStore:
    """The experiment that ``tracker`` names, made if it isn't there."""

    def __init__(self, tracker: TrackerConfig) -> None:
        from mlflow import MlflowClient

        if tracker.uri is None:
            folder = Path(str(tracker.folder))
            folder.mkdir(parents=True, exist_ok=True)
            self._client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
            artifacts = str(folder / "artifacts")
        else:
            self._client, artifacts = MlflowClient(tracker.uri), None
        self._tracker = tracker
        self._experiment = self._find_or_make(tracker.experiment, artifacts)

    def _find_or_make(self, name: str, artifacts: str | None) -> str:
        """Return the id of the experiment of that ``name``. Another process may make it first."""
        from mlflow.exceptions import MlflowException

        existing = self._client.get_experiment_by_name(name)
        if existing is None:
            try:
                return str(self._client.create_experiment(name, artifact_location=artifacts))
            except MlflowException:
                existing = self._client.get_experiment_by_name(name)
                if existing is None:
                    raise
        return str(existing.experiment_id)

    def log(self, tracked: TrackedRun, *, parent: str | None) -> None:
        """Log the ``tracked`` run whole, below ``parent`` if there is one, and end it.

        Of one that is logged nothing is done; what was begun is gone on with, and logging it twice changes nothing.
        """
        from mlflow.entities import Metric, Param

        earlier = self._find(tracked.mark)
        if earlier is not None and _WHOLE in earlier.data.tags:
            return
        run = (
            earlier.info.run_id
            if earlier is not None
            else self._make(tracked.mark, tracked.name, started=tracked.started, parent=parent)
        )
        params = [Param(_name(name), value[:_LONGEST_PARAM]) for name, value in tracked.params.items()]
        self._client.log_batch(run, params=params)
        points = [Metric(_name(point.name), point.value, point.when, point.step) for point in tracked.points]
        self._client.log_batch(run, metrics=points)
        self._tag(run, tracked.tags, notes=tracked.notes)
        self._client.set_terminated(run, status=STATUSES[tracked.status], end_time=tracked.ended)
        for file in tracked.files:
            self._client.log_artifact(run, str(file))
        self._client.set_tag(run, _WHOLE, "whole")

    def begin_sweep(self, sweep: Path) -> None:
        """Have the run of ``sweep`` there, going on: a new one, or that of the sweep that is resumed."""
        self._client.update_run(self.sweep_run(sweep), status="RUNNING")

    def sweep_run(self, sweep: Path) -> str:
        """Return the id of the run of ``sweep``, which is made if it isn't there."""
        mark = sweep_mark(sweep)
        earlier = self._find(mark)
        if earlier is not None:
            return str(earlier.info.run_id)
        run = self._make(mark, run_name(sweep), started=_now())
        self._tag(run, {}, notes=self._tracker.notes)
        return run

    def end_sweep(self, sweep: Path, records: Iterable[RunRecord], *, jobs: int) -> None:
        """Log the runs of ``sweep`` with these ``records`` that aren't, and end its own.

        It is interrupted where not all of its ``jobs`` have ended.
        """
        parent, statuses = self.sweep_run(sweep), Counter[str]()
        for record in records:
            if record.run.status != "running":
                statuses[record.run.status] += 1
                self.log(TrackedRun.of(record), parent=parent)
        statuses["not begun"] = max(0, jobs - statuses.total())
        tags = {"overrides": _overrides(sweep), "jobs": str(statuses.total()), "host": platform.node()}
        tags |= {f"jobs/{status}": str(count) for status, count in statuses.items()}
        ends = {"interrupted": ("interrupted", "not begun"), "failed": ("failed",)}
        worst = next((end for end, causes in ends.items() if any(statuses[cause] for cause in causes)), "completed")
        self._tag(parent, tags, notes=None)
        self._client.set_terminated(parent, status=STATUSES[worst], end_time=_now())
        with tempfile.TemporaryDirectory() as report_folder:
            _write_report(sweep, Path(report_folder))
            self._client.log_artifacts(parent, report_folder)

    def _find(self, mark: str) -> Any:
        """Return the run that has this ``mark``, null where there is none."""
        wanted = f"tags.`{_MARK}` = '{mark}'"
        return next(iter(self._client.search_runs([self._experiment], filter_string=wanted, max_results=1)), None)

    def _make(self, mark: str, name: str, *, started: int, parent: str | None = None) -> str:
        """Return the id of a new run that goes on, below ``parent`` if there is one."""
        tags = {_SOURCE: "offstage", _MARK: mark, **({_PARENT: parent} if parent else {})}
        run = self._client.create_run(self._experiment, start_time=started, tags=tags, run_name=name)
        return str(run.info.run_id)

    def _tag(self, run: str, tags: Mapping[str, str], *, notes: str | None) -> None:
        from mlflow.entities import RunTag

        named = {_name(name): value for name, value in tags.items()}
        named |= {_NOTES: notes} if notes else {}
        named |= {_COMMIT: tags["git_commit"]} if "git_commit" in tags else {}
        self._client.log_batch(run, tags=[RunTag(name, value[:_LONGEST_TAG]) for name, value in named.items()])


def end_sweep(sweep: Path, tracker: TrackerConfig, *, jobs: int) -> None:
    """End the run of ``sweep`` in the store of ``tracker``, to which its ``jobs`` went, whatever ended these."""
    MlflowStore(tracker).end_sweep(sweep, _records(sweep, tracker), jobs=jobs)


def _records(sweep: Path, tracker: TrackerConfig) -> Iterator[RunRecord]:
    """Yield the records below ``sweep`` of jobs that go to ``tracker``."""
    for path in sorted(sweep.glob(f"**/{RECORD}")):
        try:
            record = RunRecord.load(path)
        except StorageError:
            continue
        own = usable_tracker(record.config)
        if own is not None and replace(own, notes=None) == tracker:
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
    """Write the report's numbers of ``sweep`` into ``folder``."""
    from offstage.pipeline.report.exports import as_csv, as_json
    from offstage.pipeline.report.run_folders import find
    from offstage.pipeline.report.summary import summarise

    summary = summarise(find([sweep]))
    for name, text in {"report.csv": as_csv(summary), "report.json": as_json(summary)}.items():
        (folder / name).write_text(text, encoding="utf-8", errors="replace")


def _now() -> int:
    return round(time.time() * 1000)


def _name(name: str) -> str:
    """Return ``name`` as MLflow takes one."""
    return _UNFIT.sub("_", name)[:_LONGEST_NAME]
