"""A real MLflow server: what it has after a sweep in which a job failed, and what a run costs when it is gone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from tests.e2e.conftest import Finished, environment, finish, records_in, start

pytest.importorskip("mlflow.server", reason="the extra mlflow isn't installed: no server can be started")
pytest.importorskip("sqlalchemy", reason="mlflow is here without its server: pip install mlflow")

RESUME = [sys.executable, "-c", "from offstage.pipeline.commands import sweep; sweep()", "resume"]
EXPERIMENT = "sweeps of a test"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Yield the address of an MLflow server that has just been started, and its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    kept = tmp_path / "server"
    kept.mkdir()
    where = [f"--backend-store-uri=sqlite:///{kept / 'runs.db'}", f"--artifacts-destination={kept / 'artifacts'}"]
    command = [sys.executable, "-m", "mlflow", "server", "--host=127.0.0.1", f"--port={port}", "--workers=1", *where]
    with kept.joinpath("log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=kept, start_new_session=True)
    try:
        uri = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 120
        while not is_healthy(uri):
            assert process.poll() is None, kept.joinpath("log").read_text()
            assert time.monotonic() < deadline, kept.joinpath("log").read_text()
            time.sleep(0.1)
        yield uri, process
    finally:
        end(process)


def is_healthy(uri: str) -> bool:
    with suppress(OSError), urlopen(f"{uri}/health", timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def end(process: subprocess.Popen[bytes]) -> None:
    """End the server and its workers, which are a group of processes."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def runs_at(uri: str) -> dict[str, Any]:
    """Return the runs of the experiment by their names."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    runs = client.search_runs([client.get_experiment_by_name(EXPERIMENT).experiment_id])
    return {run.info.run_name: run for run in runs}


def files_of(uri: str, run: Any) -> list[str]:
    from mlflow import MlflowClient

    return sorted(file.path for file in MlflowClient(uri).list_artifacts(run.info.run_id))


def run(folder: Path, *arguments: str, uri: str) -> Finished:
    """Run the command with the tracker at ``uri``, to its end."""
    before = records_in(folder)
    given = ["tracker=mlflow", f"tracker.uri={uri}", f"tracker.experiment={EXPERIMENT}", "tracker.notes=one night"]
    return finish(start(folder, *arguments, *given, "generate.max_new_tokens=3"), folder, before)


def test_after_a_sweep_with_a_failed_job_the_server_has_each_job_below_the_sweep_and_all_that_is_known_of_them(
    server: tuple[str, subprocess.Popen[bytes]], fresh_folder: Path
) -> None:
    uri, process = server
    done = run(fresh_folder, "-m", "seed=1,not_a_seed", "measure.repeats=2", uri=uri)
    assert done.code == 2, done.err
    assert len(done.records) == 2, done.err
    sweep = next(iter(records_in(fresh_folder))).parents[1]
    logged = runs_at(uri)
    assert list(logged).count(f"{sweep.parent.name}/{sweep.name}") == 1
    parent, good, bad = (logged[f"{path.parent.name}/{path.name}"] for path in (sweep, sweep / "0", sweep / "1"))
    assert len(logged) == 3
    assert [one.info.status for one in (parent, good, bad)] == ["FAILED", "FINISHED", "FAILED"]
    assert {one.data.tags["mlflow.parentRunId"] for one in (good, bad)} == {parent.info.run_id}
    assert {one.data.tags["mlflow.note.content"] for one in logged.values()} == {"one night"}
    assert "not_a_seed" in parent.data.tags["overrides"]
    assert "seed=1" in good.data.tags["overrides"].split()
    assert good.data.tags["stage/generate"] == "done"
    assert good.data.tags["cached"] == "false"
    assert good.data.tags["checkpoint"].endswith("tiny")
    assert {"host", "git_commit", "provenance"} <= good.data.tags.keys()
    assert "'not_a_seed'" in bad.data.tags["error"]
    assert good.data.params["seed"] == "1"
    assert good.data.metrics["decode_seconds_per_token"] > 0
    assert files_of(uri, good) == ["run.json", "run.log"]
    assert files_of(uri, parent) == ["report.csv", "report.json"]
    steps_are_those_of_the_repeats(uri, good)
    a_resumed_sweep_keeps_its_run(uri, sweep, parent)
    a_server_that_dies_during_a_run_costs_no_result(fresh_folder, uri, process)
    a_server_that_is_gone_ends_a_run_before_any_work(fresh_folder, uri)


def steps_are_those_of_the_repeats(uri: str, good: Any) -> None:
    from mlflow import MlflowClient

    history = MlflowClient(uri).get_metric_history(good.info.run_id, "repeat/decode_seconds_per_token")
    assert [metric.step for metric in history] == [1, 2]


def a_resumed_sweep_keeps_its_run(uri: str, sweep: Path, parent: Any) -> None:
    """Run the job that failed once more, in the sweep's folder: it stands beside its first run, below the same one."""
    subprocess.run([*RESUME, str(sweep)], env=environment(), capture_output=True, timeout=300, check=False)
    from mlflow import MlflowClient

    logged = MlflowClient(uri).search_runs([parent.info.experiment_id])
    above = [run.data.tags.get("mlflow.parentRunId") for run in logged]
    assert (above.count(None), above.count(parent.info.run_id)) == (1, 3)
    assert {run.info.status for run in logged} == {"FAILED", "FINISHED"}


def a_server_that_dies_during_a_run_costs_no_result(folder: Path, uri: str, process: subprocess.Popen[bytes]) -> None:
    before = records_in(folder)
    given = ["tracker=mlflow", f"tracker.uri={uri}", "generate.max_new_tokens=4"]
    running = start(folder, *given)
    while not records_in(folder).keys() - before.keys() or not is_planned(folder, before):
        assert running.poll() is None
        time.sleep(0.005)
    end(process)
    done = finish(running, folder, before)
    assert done.code == 0, done.err
    assert done.record["status"] == "completed"
    assert f"tracker=mlflow: {uri}: not tracked, or not all of it (" in done.err


def is_planned(folder: Path, before: Any) -> bool:
    """Return whether the server was asked by now: the stages began after that."""
    return any(
        path not in before and record["config"] and record["stages"] for path, record in records_in(folder).items()
    )


def a_server_that_is_gone_ends_a_run_before_any_work(folder: Path, uri: str) -> None:
    for options in ((), ("-m", "seed=1,2")):
        done = run(folder, *options, uri=uri)
        assert done.code == 5, done.err
        (line,) = done.err.splitlines()
        assert f"tracker.uri: '{uri}' takes no run: it can't be reached within 5 s (ConnectionRefusedError" in line
        assert not any(record["stages"] for record in done.records)
