"""What a sweep's jobs go by is measured before the first, once for each checkpoint and machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig

from offstage.pipeline.config import register
from offstage.pipeline.sweeps.preparation import MachinePreparation


class Loader:
    """Composes as Hydra's own loader does for a job, and counts how often, in a file that a fork writes to too."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def load_sweep_config(self, config: Any, overrides: Sequence[str]) -> DictConfig:
        with self.log.open("a") as file:
            file.write(f"{' '.join(overrides)}\n")
        register()
        with initialize_config_module("offstage.conf", version_base="1.3"):
            return compose("config", [*config, *overrides], return_hydra_config=True)


@pytest.fixture
def prepared(tmp_path: Path) -> Any:
    loader, preparation = Loader(tmp_path / "log"), MachinePreparation()

    def prepare(*jobs: list[str]) -> list[str]:
        preparation.prepare(loader, [f"outputs={tmp_path}/outputs"], jobs)
        return loader.log.read_text().splitlines()

    return prepare


def test_the_rates_of_this_machine_are_there_before_a_job_has_begun(prepared: Any, tmp_path: Path) -> None:
    prepared(["max_memory.cpu=2MB"])
    assert '"host"' in (tmp_path / "outputs/cache/hardware/decoding.json").read_text()


def test_jobs_of_one_checkpoint_and_machine_need_one_look(prepared: Any) -> None:
    budgets = (["max_memory.cpu=2MB", "dtype=float32"], ["max_memory.cpu=3MB", "dtype=float16"])
    assert prepared(*budgets) == [""]
    assert prepared(*budgets) == [""], "not a second time"
    assert prepared(["model.width=3", "seed=3"]) == ["", "model.width=3"]


@pytest.mark.parametrize("override", ["hardware=2x24gb", "hardware.rates.host=nonsense"])
def test_another_machine_isn_t_measured_and_a_faulty_job_says_so_itself(
    override: str, prepared: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prepared([override])
    measured = {path.name for path in tmp_path.glob("outputs/cache/hardware/*.json")}
    assert measured <= {"process_memory.json"}, "what a process holds, wherever the run that it stands for is planned"
    assert capfd.readouterr().err == ""
