"""The same sweep on a real Slurm, which these tests start on this machine and stop again."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import COMMAND, environment, heed_signals, records_in, wait_for
from tests.e2e.slurm import cluster, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"not installed: {', '.join(missing())}")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Yield the environment in which the cluster is found."""
    pytest.importorskip("submitit")
    with cluster(tmp_path_factory.mktemp("slurm")) as environment:
        yield {"SLURM_CONF": environment["SLURM_CONF"]}


def start(folder: Path, variables: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, "-m", "hydra/launcher=submitit_slurm", *arguments],
        cwd=folder, env=environment(variables), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=heed_signals,
    )  # fmt: skip


def test_three_jobs_through_sbatch_leave_their_results_in_the_same_place(tmp_path: Path, slurm: dict[str, str]) -> None:
    sweep = start(tmp_path, slurm, "max_memory.cpu=2.4MB,100KB,8MB", "generate.max_new_tokens=3")
    out, err = sweep.communicate(timeout=280)
    records = {path.parent.name: record for path, record in records_in(tmp_path).items()}
    assert sweep.returncode == 4, err
    assert {number: record["status"] for number, record in records.items()} == {
        "0": "completed", "1": "failed", "2": "completed"
    }  # fmt: skip
    assert all(path.match("outputs/multirun/*/*/*/run.json") for path in records_in(tmp_path))
    assert records["0"]["outputs"] == records["2"]["outputs"]
    assert "2 of 3 completed, 1 failed" in out
    assert len(list(tmp_path.glob("outputs/cache/empty_init/*/manifest.json"))) == 1


def test_a_controller_that_squeue_can_t_reach_loses_no_job(tmp_path: Path, slurm: dict[str, str]) -> None:
    squeue = tmp_path / "bin/squeue"
    squeue.parent.mkdir()
    squeue.write_text("#!/bin/sh\necho Unable to contact slurm controller >&2\nexit 1\n")
    squeue.chmod(0o755)
    path = f"{squeue.parent}{os.pathsep}{os.environ['PATH']}"
    sweep = start(tmp_path, {**slurm, "PATH": path}, "seed=1,2", "stop_after=plan")
    out, err = sweep.communicate(timeout=280)
    assert sweep.returncode == 0, err
    assert "2 of 2 completed" in out


def test_an_interrupted_sweep_leaves_no_job_in_the_queue(tmp_path: Path, slurm: dict[str, str]) -> None:
    sweep = start(tmp_path, slurm, "seed=1,2,3", "generate.max_new_tokens=100000", "generate.prompts=[[5,6,7]]")
    wait_for(lambda: any(record["stages"] for record in records_in(tmp_path).values()), sweep)
    sweep.send_signal(signal.SIGINT)
    out, err = sweep.communicate(timeout=280)
    queued = subprocess.run(["squeue", "-h"], env=environment(slurm), capture_output=True, text=True, check=True)
    assert (sweep.returncode, err, queued.stdout) == (130, "offstage: interrupted\n", "")
    assert {record["status"] for record in records_in(tmp_path).values()} == {"interrupted"}
    assert "0 of 3 completed" in out


@pytest.fixture
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Yield the environment in which a cluster of two nodes is found."""
    pytest.importorskip("submitit")
    with cluster(tmp_path_factory.mktemp("nodes"), nodes=2) as environment:
        yield {"SLURM_CONF": environment["SLURM_CONF"]}


def test_several_nodes_for_a_job_of_one_host_are_refused(tmp_path: Path, slurm: dict[str, str]) -> None:
    out, err = start(tmp_path, slurm, "seed=1,2", "hydra.launcher.nodes=2").communicate(timeout=280)
    assert "hydra.launcher.nodes: 2 tasks for job 0, which runs on one host; give hardware.hosts=auto" in err, out


@pytest.mark.long_form
def test_jobs_of_two_nodes_divide_the_model_and_one_that_is_queued_again_is_right(
    tmp_path: Path, two_nodes: dict[str, str]
) -> None:
    asked = ["max_memory.cpu=2.4MB,8MB", "generate.max_new_tokens=700", "generate.min_new_tokens=700"]
    sweep = start(tmp_path, two_nodes, "hydra.launcher.nodes=2", "hardware.hosts=auto", *asked)
    logs = "outputs/multirun/*/*/0/run.log"
    wait_for(lambda: any("generate: begins" in log.read_text() for log in tmp_path.glob(logs)), sweep)
    look = ["squeue", "-h", "-t", "RUNNING", "-o", "%A"]
    running = subprocess.run(look, env=environment(two_nodes), capture_output=True, text=True, check=True)
    job = running.stdout.split()[0]
    subprocess.run(["scontrol", "requeue", job], env=environment(two_nodes), check=True)
    out, err = sweep.communicate(timeout=280)
    assert sweep.returncode == 0, err
    assert "2 of 2 completed" in out
    jobs = [record for path, record in records_in(tmp_path).items() if ".hosts" not in path.parts]
    assert [record["status"] for record in jobs] == ["completed", "completed"]
    assert all(len(record["hosts"]) == 2 for record in jobs)
    assert jobs[0]["outputs"] == jobs[1]["outputs"]
    statuses = [record["status"] for path, record in records_in(tmp_path).items() if ".hosts" in path.parts]
    assert sorted(statuses) in (["completed", "completed", "failed"], ["completed", "completed", "interrupted"])
