"""Trackers: a run's record, logged through MLflow or Trackio to a store on this machine as well.

It happens after the run, in the process that waits for it, so that a tracker's memory is no part of what was measured.
A tracker that fails is a warning: the record is there.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipeline.plain_data import leaves
from pipeline.provenance import provenance
from pipeline.record import RunRecord
from pipeline.stage import Config

_log = logging.getLogger("offstage")
_LONGEST_PARAM = 500
_LOG_NAME = "run.log"


def track(config: Config, path: Path) -> None:
    """Log the record in ``path`` to the tracker that its ``config`` names, if it names one."""
    tracker: Mapping[str, Any] = config.get("tracker") or {}
    log = {"mlflow": _to_mlflow, "trackio": _to_trackio}.get(str(tracker.get("kind")))
    if log is None or find_spec(tracker["kind"]) is None:
        return  # the config's checks have said so
    try:
        Path(tracker["folder"]).mkdir(parents=True, exist_ok=True)
        log(RunRecord.load(path), tracker)
    except (OSError, RuntimeError, ValueError, _library_error(tracker["kind"])) as error:
        _log.warning("tracker=%s: %s: %s; the run itself is in %s", tracker["kind"], type(error).__name__, error, path)


def metrics(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record: its metrics, each stage's seconds, memory by kind and device."""
    found = dict(record["metrics"])
    found |= {f"seconds/{stage['name']}": stage["seconds"] for stage in record["stages"]}
    for kind, devices in record["memory"].items():
        found |= {f"memory/{kind}/{device}": count for device, count in devices.items()}
    numbers = {name: value for name, value in found.items() if isinstance(value, int | float)}
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}


def _library_error(kind: str) -> type[Exception]:
    """Return what MLflow raises; Trackio has no error class of its own."""
    if kind != "mlflow":
        return OSError
    error: type[Exception] = importlib.import_module("mlflow.exceptions").MlflowException
    return error


def _to_mlflow(record: RunRecord, tracker: Mapping[str, Any]) -> None:
    mlflow: Any = importlib.import_module("mlflow")
    folder = Path(tracker["folder"])
    mlflow.set_tracking_uri(f"sqlite:///{folder / 'mlflow.db'}")
    if mlflow.get_experiment_by_name(tracker["experiment"]) is None:
        mlflow.create_experiment(tracker["experiment"], artifact_location=str(folder / "artifacts"))
    mlflow.set_experiment(tracker["experiment"])
    with mlflow.start_run(run_name=_name(record)) as run:
        mlflow.log_params({name: str(value)[:_LONGEST_PARAM] for name, value in leaves(record.config)})
        mlflow.log_metrics(metrics(record.data))
        mlflow.set_tag("figures", _figures(record))
        for file in (record.path, record.path.with_name(_LOG_NAME)):
            if file.is_file():
                mlflow.log_artifact(str(file))
    if record.data["status"] != "completed":
        status = "KILLED" if record.data["status"] == "interrupted" else "FAILED"
        mlflow.MlflowClient().set_terminated(run.info.run_id, status=status)


def _to_trackio(record: RunRecord, tracker: Mapping[str, Any]) -> None:
    os.environ["TRACKIO_DIR"] = str(tracker["folder"])  # read when the library is imported
    trackio: Any = importlib.import_module("trackio")
    config = {name: str(value) for name, value in leaves(record.config)}
    trackio.init(project=tracker["experiment"], name=_name(record), config=config)
    trackio.log({**metrics(record.data), "status": record.data["status"], "figures": _figures(record)})
    trackio.finish()


def _figures(record: RunRecord) -> str:
    """Return where the numbers come from: this run, or an earlier one."""
    return provenance(record.data["stages"], record.data.get("samples", ())).told()


def _name(record: RunRecord) -> str:
    folder = record.path.parent
    return f"{folder.parent.name}/{folder.name}"
