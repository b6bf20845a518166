"""What a sweep's jobs go by is measured before the first, once for each checkpoint and machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module

from offstage.pipeline.cache.sealed_files import read_sealed
from offstage.pipeline.config import register, resolve
from offstage.pipeline.sweeps.local_jobs import MachinePreparation


def config(folder: Path, *overrides: str) -> dict[str, Any]:
    """Return the config of a job with these overrides, as it is run."""
    register()
    with initialize_config_module("offstage.conf", version_base="1.3"):
        return resolve(compose("config", [f"outputs={folder}/outputs", *overrides]))


def test_the_rates_of_this_machine_are_there_before_a_job_has_begun(tmp_path: Path) -> None:
    MachinePreparation().prepare([config(tmp_path, "max_memory.cpu=2MB")])
    kept = read_sealed(tmp_path / "outputs/cache/hardware/decoding.json")
    assert [key.split()[0] for key in kept or ()] == ["narrow"], "those that its jobs go by"


def test_jobs_of_one_checkpoint_and_machine_need_one_look(tmp_path: Path) -> None:
    budgets = (("max_memory.cpu=2MB", "dtype=float32"), ("max_memory.cpu=3MB", "dtype=float16"))
    jobs, preparation = [config(tmp_path, *each) for each in budgets], MachinePreparation()
    assert len(preparation.unlike(jobs)) == 1
    assert preparation.unlike(jobs) == [], "not a second time"
    another = config(tmp_path, "hardware.host={memory: 1GB}", "seed=3")
    assert preparation.unlike([*jobs, another, {}]) == [another], "a faulty job has no config"


@pytest.mark.parametrize("override", ["hardware=2x24gb", "hardware.rates.host=nonsense"])
def test_another_machine_isn_t_measured_and_a_faulty_job_says_so_itself(
    override: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    MachinePreparation().prepare([config(tmp_path, override)])
    measured = {path.name for path in tmp_path.glob("outputs/cache/hardware/*.json")}
    assert measured <= {"process_memory.json"}, "what a process holds, wherever the run that it stands for is planned"
    assert capfd.readouterr().err == ""
