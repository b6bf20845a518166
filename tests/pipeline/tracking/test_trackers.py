"""Trackers: that the real libraries keep a run in a store on this machine, and what a store's end costs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from offstage.pipeline import hydra_task
from offstage.pipeline.record import RunRecord
from offstage.pipeline.run_schema import StageRun, Status
from offstage.pipeline.stage import Report
from offstage.pipeline.tracking.options import usable_tracker
from offstage.pipeline.tracking.trackers import SweepTracking


def finished(
    folder: Path, kind: str | None, *, name: str = "1", status: Status = "completed", **tracker: Any
) -> RunRecord:
    """Return the record of a run that ended, its tracker's store beside it."""
    given = {"kind": kind, "folder": str(folder / "store"), "experiment": "offstage", **tracker}
    config = {"tracker": given, "seed": 3, "generate": {"prompts": ["a"]}}
    record = RunRecord.start(folder / "today" / name, overrides=[], config=config, environment={})
    record.add_stage(StageRun(name="plan", key="", cached=False, seconds=0.5, artifact=""))
    record.merge(Report(metrics={"load_seconds": 1.25}, memory={"measured": {"cpu": 10}}))
    record.finish(status)
    return record


def tracked(record: RunRecord, *, sweep: Path | None = None) -> None:
    with hydra_task.tracked(record, sweep=sweep):
        """The run has ended already."""


@pytest.mark.parametrize("kind", [None, "not_a_tracker"])
def test_no_tracker_is_no_work(kind: str | None, tmp_path: Path) -> None:
    record = finished(tmp_path, kind)
    tracked(record)
    record.path.unlink()
    tracked(record)
    assert not tmp_path.joinpath("store").exists()


def test_a_config_that_could_not_be_resolved_has_no_tracker() -> None:
    assert usable_tracker({}) is None
    assert usable_tracker({"tracker": {"kind": "mlflow", "experiment": 5}}) is None


@pytest.mark.skipif(not any(map(find_spec, ("mlflow", "trackio"))), reason="needs a tracker's library")
def test_a_store_that_fails_is_a_warning_that_says_what_was_not_tracked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind = next(kind for kind in ("mlflow", "trackio") if find_spec(kind))
    record = finished(tmp_path, kind)
    record.path.unlink()
    tracked(record)
    (warning,) = caplog.messages
    assert "not tracked, or not all of it (" in warning
    assert f"the run itself is in {record.path.parent}" in warning


def test_mlflow_keeps_a_run_once_however_often_it_is_logged(tmp_path: Path) -> None:
    mlflow: Any = pytest.importorskip("mlflow", reason="the extra mlflow isn't installed")
    pytest.importorskip("sqlalchemy", reason="mlflow is here without what its databases need")
    record = finished(tmp_path, "mlflow", notes="a note")
    tracked(record)
    tracked(record)
    tracked(finished(tmp_path, "mlflow", name="2", status="interrupted"))
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'store' / 'mlflow.db'}")
    killed, run = client.search_runs([client.get_experiment_by_name("offstage").experiment_id])
    assert (run.info.status, killed.info.status) == ("FINISHED", "KILLED")
    assert run.data.params["seed"] == "3"
    assert run.data.metrics["load_seconds"] == 1.25
    assert run.data.tags["mlflow.note.content"] == "a note"
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["run.json"]
    assert run.data.tags["offstage.run"] == f"{record.path.parent}@{record.data['started']}"


def test_a_sweep_s_end_logs_what_its_jobs_could_not_and_nothing_twice(tmp_path: Path) -> None:
    mlflow: Any = pytest.importorskip("mlflow", reason="the extra mlflow isn't installed")
    pytest.importorskip("sqlalchemy", reason="mlflow is here without what its databases need")
    sweep = tmp_path / "today"
    early = finished(tmp_path, "mlflow")
    tracked(early, sweep=sweep)
    finished(tmp_path, "mlflow", name="2", status="failed")
    finished(tmp_path, None, name="3")
    finished(tmp_path, "mlflow", name="4", experiment="elsewhere")  # which no job of the sweep names
    for _ in range(2):
        tracking = SweepTracking(sweep)
        tracking.begin([], done=[early.config, {}])
        tracking.end(jobs=2)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'store' / 'mlflow.db'}")
    assert client.get_experiment_by_name("elsewhere") is None
    logged = client.search_runs([client.get_experiment_by_name("offstage").experiment_id])
    runs = {run.info.run_name.rpartition("/")[2]: run for run in logged}
    assert len(logged) == 3
    parent = runs["today"]
    assert {name: run.info.status for name, run in runs.items()} == {"1": "FINISHED", "2": "FAILED", "today": "FAILED"}
    assert {runs[name].data.tags["mlflow.parentRunId"] for name in ("1", "2")} == {parent.info.run_id}
    assert parent.data.tags["jobs/failed"] == "1"
    assert parent.data.tags["host"]
    assert "report.json" in [file.path for file in client.list_artifacts(parent.info.run_id)]


@pytest.mark.skipif(not find_spec("mlflow"), reason="the extra mlflow isn't installed")
def test_a_store_without_an_end_costs_its_patience_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offstage.pipeline.tracking.trackers.PATIENCE_SECONDS", 0.1)
    tracked(finished(tmp_path, "mlflow"))
    assert "not tracked, or not all of it (no end within 0 s)" in caplog.messages[0]


@pytest.mark.skipif(find_spec("trackio") is None, reason="the extra trackio isn't installed")
def test_trackio_keeps_the_run(tmp_path: Path) -> None:
    tracked(finished(tmp_path, "trackio"))
    assert tmp_path.joinpath("store", "offstage.db").is_file()
