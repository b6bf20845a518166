"""Trackers: what is logged, and that the real libraries keep it in a store on this machine."""

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import check
from pipeline.record import RunRecord, StageRecord
from pipeline.stage import Report
from pipeline.trackers import metrics, track


def tracked(record: RunRecord) -> None:
    track(record.config, record.path)


def finished(folder: Path, kind: str | None) -> RunRecord:
    tracker = {"kind": kind, "folder": str(folder / "store"), "experiment": "offstage"}
    config = {"tracker": tracker, "seed": 3, "generate": {"prompts": ["a"]}}
    record = RunRecord.start(folder / "today" / "1", overrides=[], config=config, environment={})
    record.add_stage(StageRecord(name="plan", key="", cached=False, seconds=0.5, artifact=""))
    record.merge(Report(metrics={"load_seconds": 1.25}, memory={"measured": {"cpu": 10}}))
    record.finish("completed")
    return record


def test_a_record_becomes_the_numbers_that_are_known(tmp_path: Path) -> None:
    assert metrics(finished(tmp_path, None).data) == {
        "load_seconds": 1.25, "seconds/plan": 0.5, "memory/measured/cpu": 10.0
    }  # fmt: skip
    assert "x" not in metrics({"metrics": {"x": math.nan}, "stages": [], "memory": {}})


def test_what_is_no_number_is_not_logged_as_one(tmp_path: Path) -> None:
    record = finished(tmp_path, None)
    record.merge(Report(metrics={"bound": "storage"}))
    record.note_series("cpu", [(0.5, 10)])
    assert set(metrics(record.data)) == {"load_seconds", "seconds/plan", "memory/measured/cpu"}


@pytest.mark.parametrize("kind", [None, "not_a_tracker"])
def test_no_tracker_is_no_work(kind: str | None, tmp_path: Path) -> None:
    tracked(finished(tmp_path, kind))
    assert not tmp_path.joinpath("store").exists()


@pytest.mark.skipif(not any(map(find_spec, ("mlflow", "trackio"))), reason="needs a tracker's library")
def test_a_tracker_that_fails_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kind = next(kind for kind in ("mlflow", "trackio") if find_spec(kind))
    record = finished(tmp_path, kind)
    tmp_path.joinpath("store").touch()
    tracked(record)
    record.path.unlink()
    tracked(record)
    assert [f"the run itself is in {record.path}" in warning for warning in caplog.messages] == [True, True]


@pytest.mark.parametrize("kind", [None, "not_a_tracker"])
def test_a_record_that_cannot_be_read_is_nothing_to_a_run_without_a_tracker(kind: str | None, tmp_path: Path) -> None:
    record = finished(tmp_path, kind)
    record.path.unlink()
    tracked(record)


@pytest.mark.parametrize(
    ("tracker", "words"),
    [({"kind": "wandb"}, "is no tracker"), ({"kind": "mlflow"}, "pip install 'offstage-pipeline[mlflow]'")],
)
def test_a_tracker_that_cannot_be_had_is_a_fault(
    tracker: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.config.find_spec", lambda name: None)
    config: dict[str, Any] = {
        "model": {"kind": "module"}, "dtype": "auto", "seed": 0, "stages": ["plan"], "stop_after": None,
        "outputs": "outputs", "offload_folder": None, "offload_state_dict": False, "tracker": tracker,
    }  # fmt: skip
    (fault,) = check(config, ["plan"])
    assert words in str(fault)


def test_mlflow_keeps_params_metrics_and_artifacts(tmp_path: Path) -> None:
    mlflow: Any = pytest.importorskip("mlflow", reason="the extra mlflow isn't installed")
    pytest.importorskip("sqlalchemy", reason="mlflow is here without what its databases need")
    tracked(finished(tmp_path, "mlflow"))
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'store' / 'mlflow.db'}")
    (run,) = mlflow.search_runs(experiment_names=["offstage"], output_format="list")
    assert run.info.status == "FINISHED"
    assert run.data.params["seed"] == "3"
    assert run.data.metrics["load_seconds"] == 1.25
    assert [file.path for file in mlflow.MlflowClient().list_artifacts(run.info.run_id)] == ["run.json"]


@pytest.mark.skipif(find_spec("trackio") is None, reason="the extra trackio isn't installed")
def test_trackio_keeps_the_run(tmp_path: Path) -> None:
    tracked(finished(tmp_path, "trackio"))
    assert tmp_path.joinpath("store", "offstage.db").is_file()
