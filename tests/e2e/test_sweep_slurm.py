"""The same sweep on a real Slurm, which this test starts on this machine and stops again."""

from pathlib import Path
from subprocess import run

import pytest

from tests.e2e.conftest import COMMAND, environment, records_in
from tests.e2e.slurm import cluster, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"not installed: {', '.join(missing())}")


def test_three_jobs_through_sbatch_leave_their_results_in_the_same_place(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    arguments = ["-m", "hydra/launcher=submitit_slurm", "max_memory.cpu=2.4MB,100KB,8MB", "generate.max_new_tokens=3"]
    with cluster(tmp_path_factory.mktemp("slurm")) as slurm:
        variables = environment({"SLURM_CONF": slurm["SLURM_CONF"]})
        done = run([*COMMAND, *arguments], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=280)
    found = {path.parent.name: record for path, record in records_in(tmp_path).items()}
    assert done.returncode == 4, done.stderr
    assert {number: record["status"] for number, record in found.items()} == {
        "0": "completed", "1": "failed", "2": "completed"
    }  # fmt: skip
    assert all(path.match("outputs/multirun/*/*/*/run.json") for path in records_in(tmp_path))
    assert found["0"]["outputs"] == found["2"]["outputs"]
    assert "2 of 3 completed, 1 failed" in done.stdout
    assert len(list(tmp_path.glob("outputs/cache/empty_init/*/manifest.json"))) == 1
