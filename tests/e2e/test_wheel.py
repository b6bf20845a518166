"""The wheel alone is enough: the command runs from an empty folder, without the repository."""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
STAGES = ["empty_init", "plan", "shard_load", "dispatch", "generate"]
WHERE = """
import importlib.metadata as metadata, json
import conf, pipeline, stages
sources = [module.__file__ for module in (conf, pipeline, stages)]
print(json.dumps([*sources, str(metadata.distribution("offstage-pipeline").locate_file(""))]))
"""


def run(command: Sequence[object], *, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``command`` in ``folder``, in an environment with no Python settings but ``variables``."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST", "HYDRA"))
    }
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={**inherited, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{command} exited {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, built without a network by the hatchling of this environment."""
    folder = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT], folder=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the installed wheel; what it depends on is this environment's."""
    target = tmp_path_factory.mktemp("installed")
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", target, wheel]
    run(install, folder=target)
    return target


def test_the_wheel_holds_the_packages_and_their_data(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tops = {name.split("/")[0] for name in names}
    packages = [ROOT / top for top in ("pipeline", "stages", "conf")]
    shipped = [path for package in packages for path in package.rglob("*") if "__pycache__" not in path.parts]
    expected = {path.relative_to(ROOT).as_posix() for path in shipped if path.is_file()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"pipeline", "stages", "conf"}
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert "conf/config.yaml" in names
    assert "conf/checkpoints/tiny/model.safetensors.index.json" in names


def test_the_installed_command_runs_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    here = {"PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1"}
    found = json.loads(run([sys.executable, "-c", WHERE], folder=tmp_path, **here).stdout)
    assert [path for path in found if not Path(path).is_relative_to(installed)] == []

    done = run([sys.executable, installed / "bin" / "offstage"], folder=tmp_path, **here)

    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]
    record = only_record(tmp_path / "outputs" / "runs")
    assert record["status"] == "completed"
    assert [stage["name"] for stage in record["stages"]] == STAGES
    assert all(Path(stage["artifact"]).is_relative_to(tmp_path) for stage in record["stages"])
    assert all(output["token_ids"] for output in record["outputs"])
    assert "Traceback" not in done.stderr


def only_record(runs: Path) -> Mapping[str, Any]:
    """Return the one run record that lies under ``runs``."""
    (path,) = runs.glob("*/*/run.json")
    record: Mapping[str, Any] = json.loads(path.read_text())
    return record
