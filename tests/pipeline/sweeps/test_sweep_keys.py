"""Hydra finds the sweepers by itself, and names that users know mean this command's, at no cost to a run."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from offstage.pipeline.errors import ConfigError
from offstage.pipeline.sweeps.sweep_keys import HERE, SLURM, HereKeys, SlurmKeys, refuse_launcher
from tests.long_form import in_ci

ROOT = Path(__file__).parents[2]
PATHS = [str(ROOT), str(ROOT / ".src")]
SCAN = f"""
import json, sys
sys.path[:0] = {PATHS}
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
found = [f"{{each.__module__}}.{{each.__name__}}" for each in Plugins.instance().discover(Sweeper)]
print(json.dumps([found, list(sys.modules)]))
"""
CHOSEN = """
from hydra import compose, initialize_config_module
from offstage.pipeline.config import register
from offstage.pipeline.sweeps.sweep_keys import register_sweeps
register_sweeps()
register()
with initialize_config_module("offstage.conf", version_base="1.3"):
    config = compose("config", [f"hydra/launcher={sys.argv[1]}"], return_hydra_config=True)
print(json.dumps([config.hydra.launcher._target_, config.hydra.sweeper._target_]))
"""


def printed(program: str, *arguments: str) -> object:
    """Return what a program prints last in a new Python, which is JSON."""
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout.splitlines()[-1])


def test_looking_for_plugins_finds_them_and_imports_nothing_that_only_a_sweep_or_a_run_needs() -> None:
    plugins, modules = printed(SCAN)
    assert {f"hydra_plugins.offstage_sweepers.{kind}Sweeper" for kind in ("Grid", "Optuna")} <= set(plugins)
    assert {"torch", "transformers", "submitit", "optuna", "rich", "offstage.pipeline.runner", "stages"} & set(
        modules
    ) == set()


@pytest.mark.parametrize(
    ("chosen", "launcher"),
    in_ci(
        ("submitit_slurm", SLURM),
        ("basic", HERE),
        of=[("local", HERE), ("submitit_local", HERE), ("submitit_slurm", SLURM), ("basic", HERE)],
    ),
)
def test_the_names_that_users_know_choose_where_jobs_run(chosen: str, launcher: str) -> None:
    assert printed(SCAN + CHOSEN, chosen) == [launcher, "hydra_plugins.offstage_sweepers.GridSweeper"]


def test_a_program_that_is_not_this_command_keeps_the_sweeper_it_had() -> None:
    stored = "\nfrom hydra.core.config_store import ConfigStore\n" + (
        "print(json.dumps(ConfigStore.instance().repo['hydra']['sweeper']['basic.yaml'].node._target_))"
    )
    assert printed(SCAN + stored) == "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"_target_": "a.Launcher"}, "hydra/launcher: 'a.Launcher' forgets what the jobs of a sweep came to"),
        (
            {"_target_": HERE, "n_jobs": None, "timeout_min": 5},
            "hydra.launcher.timeout_min: 5 is for a queue, and jobs on this machine have none",
        ),
        ({"_target_": HERE, "n_jobs": None, "mem_gb": 1, "nodes": 2}, "hydra.launcher.nodes: 2 is for a queue"),
        ({"_target_": HERE, "n_jobs": 0}, "hydra.launcher.n_jobs: 0 is no number of jobs; give 1 or more, or null"),
    ],
)
def test_what_cannot_run_a_sweep_or_means_nothing_here_is_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        refuse_launcher(OmegaConf.create(keys))
    assert words in str(refused.value)


@pytest.mark.parametrize("keys", [HereKeys(), HereKeys(n_jobs=4), SlurmKeys(timeout_min=5)])
def test_what_can_is_taken(keys: HereKeys | SlurmKeys) -> None:
    refuse_launcher(OmegaConf.structured(keys))
