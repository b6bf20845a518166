"""Hydra finds the launchers by itself, and ``submitit_local`` and ``submitit_slurm`` name them, at no cost to a run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.long_form import in_ci

ROOT = Path(__file__).parents[2]
PATHS = [str(ROOT), str(ROOT / ".src")]
SCAN = f"""
import json, sys
sys.path[:0] = {PATHS}
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
found = [f"{{each.__module__}}.{{each.__name__}}" for each in Plugins.instance().discover(Launcher)]
print(json.dumps([found, list(sys.modules)]))
"""
CHOSEN = """
from hydra import compose, initialize_config_module
from offstage.pipeline.config import register
from offstage.pipeline.sweeps.launchers import register_launchers
register_launchers()
register()
with initialize_config_module("offstage.conf", version_base="1.3"):
    config = compose("config", [f"hydra/launcher={sys.argv[1]}"], return_hydra_config=True)
print(json.dumps(config.hydra.launcher._target_))
"""


def printed(program: str, *arguments: str) -> object:
    """Return what a program prints last in a new Python, which is JSON."""
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout.splitlines()[-1])


def test_hydra_finds_them_among_its_plugins() -> None:
    found, _ = printed(SCAN)
    assert {f"hydra_plugins.offstage_launchers.{kind}Launcher" for kind in ("Local", "Slurm", "InTurn")} <= set(found)


def test_looking_for_plugins_imports_nothing_that_only_a_sweep_or_a_run_needs() -> None:
    _, modules = printed(SCAN)
    assert {"torch", "transformers", "submitit", "optuna", "rich", "offstage.pipeline.runner", "stages"} & set(
        modules
    ) == set()


@pytest.mark.parametrize(
    ("chosen", "launcher"),
    in_ci(
        ("submitit_slurm", "Slurm"),
        ("basic", "InTurn"),
        of=[("local", "Local"), ("submitit_local", "Local"), ("submitit_slurm", "Slurm"), ("basic", "InTurn")],
    ),
)
def test_the_names_that_users_know_choose_them(chosen: str, launcher: str) -> None:
    assert printed(SCAN + CHOSEN, chosen) == f"hydra_plugins.offstage_launchers.{launcher}Launcher"


def test_a_program_that_is_not_this_command_keeps_the_launchers_it_had() -> None:
    stored = "\nfrom hydra.core.config_store import ConfigStore\n" + (
        "node = ConfigStore.instance().repo['hydra']['launcher'][f'submitit_{sys.argv[1]}.yaml'].node\n"
        "print(json.dumps(node._target_))"
    )
    for kind in ("local", "slurm"):
        target = f"hydra_plugins.hydra_submitit_launcher.submitit_launcher.{kind.title()}Launcher"
        assert printed(SCAN + stored, kind) == target
