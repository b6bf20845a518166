"""The wheel alone is enough: command and ``import offstage`` work from an empty folder, without the repository.

An editable install offers the same names, from the repository's own files.
"""

import json
import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import offstage
from tests.long_form import in_ci

ROOT = Path(__file__).parents[2]
STAGES = ["empty_init", "plan", "shard_load", "dispatch", "generate"]
WHERE = """
import importlib.metadata as metadata, json
import hydra_plugins.offstage_sweepers as sweepers, offstage
from offstage import conf, pipeline, stages
sources = [module.__file__ for module in (conf, sweepers, offstage, pipeline, stages)]
print(json.dumps([*sources, str(metadata.distribution("offstage-pipeline").locate_file(""))]))
"""

FOLDERS = {".src/": "", **{f"{top}/": f"offstage/{top}/" for top in ("pipeline", "stages", "conf")}}
"""Where the build puts each folder of the repository."""
OWN = {"pipeline.py": "raise SystemExit('not mine')", "stages/__init__.py": "", "conf/config.yaml": "mine: 1"}
"""What a user may have beside a script, under names that offstage's folders have too."""
ALONE = ("--no-deps", "--no-index", "--no-compile")
"""Options of pip: what is imported is compiled then."""
DESCRIBED = ("hardware.devices=[]", "+hardware.host.memory=8GB")
"""A machine that is described: nothing is measured of this one, which takes longer than the run."""
SCRIPT = """
import offstage
offstage.check_device_map(offstage.init_empty_weights, 1)
offstage.dispatch_modell
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
    install = [sys.executable, "-m", "pip", "install", *ALONE, "--target", target, wheel]
    run(install, folder=target)
    return target


@pytest.fixture(scope="module")
def editable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment with an editable install; what it depends on is this environment's."""
    folder = tmp_path_factory.mktemp("editable")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    packages.joinpath("zz_dependencies.pth").write_text("\n".join(path for path in sys.path if "-packages" in path))
    build = ["install", *ALONE, "--no-build-isolation", "--editable", ROOT]
    run([python, "-m", "pip", *build], folder=folder)
    return python


def test_the_wheel_holds_the_packages_and_their_data(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tops = {name.split("/")[0] for name in names}
    packages = [ROOT / folder for folder in FOLDERS]
    shipped = [path for package in packages for path in package.rglob("*") if "__pycache__" not in path.parts]
    expected = {installed_as(path.relative_to(ROOT).as_posix()) for path in shipped if path.is_file()}
    if (ROOT / ".git").exists():  # which the build asks for the commit
        expected.add("offstage/pipeline/git_commit.txt")
    assert {top for top in tops if not top.endswith(".dist-info")} == {"offstage", "hydra_plugins"}
    assert "offstage/py.typed" in names
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert "offstage/conf/config.yaml" in names
    assert "offstage/conf/checkpoints/tiny/model.safetensors.index.json" in names


def test_the_installed_command_runs_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    here = {"PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1"}
    places = json.loads(run([sys.executable, "-c", WHERE], folder=tmp_path, **here).stdout)
    assert [path for path in places if not Path(path).is_relative_to(installed)] == []

    done = run([sys.executable, installed / "bin" / "offstage", *DESCRIBED], folder=tmp_path, **here)

    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]
    record = only_record(tmp_path / "outputs" / "runs")
    assert record["status"] == "completed"
    assert [stage["name"] for stage in record["stages"]] == STAGES
    assert all(Path(stage["artifact"]).is_relative_to(tmp_path) for stage in record["stages"])
    assert all(output["token_ids"] for output in record["outputs"])
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("kind", in_ci("wheel", of=["wheel", "editable"]))
def test_a_user_s_own_files_of_the_same_names_hide_nothing(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    for name, text in OWN.items():
        tmp_path.joinpath(name).parent.mkdir(exist_ok=True)
        tmp_path.joinpath(name).write_text(text)
    tmp_path.joinpath("script.py").write_text("import offstage, stages; print(offstage.load, stages.__file__)")
    if kind == "wheel":
        here = {"PYTHONPATH": str(request.getfixturevalue("installed"))}
        printed = run([sys.executable, "script.py"], folder=tmp_path, **here).stdout
    else:
        printed = run([request.getfixturevalue("editable"), "script.py"], folder=tmp_path).stdout
    assert printed.startswith("<function load at ")
    assert printed.split()[-1] == str(tmp_path / "stages/__init__.py")


def test_an_editable_install_offers_the_same_names_from_the_repository(editable: Path, tmp_path: Path) -> None:
    places = json.loads(run([editable, "-c", WHERE], folder=tmp_path).stdout)
    assert [path for path in places[:-1] if not Path(path).is_relative_to(ROOT)] == []
    names = run([editable, "-c", "import offstage; print(*offstage.__all__)"], folder=tmp_path).stdout.split()
    assert names == offstage.__all__


def test_a_type_checker_sees_the_types_of_an_installed_offstage(editable: Path, tmp_path: Path) -> None:
    tmp_path.joinpath("script.py").write_text(SCRIPT)
    tmp_path.joinpath("mypy.ini").write_text("[mypy-torch.*,transformers.*]\nfollow_imports = skip\n")
    mypy = [sys.executable, "-m", "mypy", "--python-executable", editable, "--cache-dir", os.devnull, "script.py"]
    done = subprocess.run(mypy, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    faults = [line for line in done.stdout.splitlines() if line.startswith("script.py")]
    assert [fault.partition(": error: ")[2] for fault in faults] == [
        'Argument 2 to "check_device_map" has incompatible type "int"; expected "Mapping[str, Any]"  [arg-type]',
        'Module has no attribute "dispatch_modell"; maybe "dispatch_model"?  [attr-defined]',
    ]


def installed_as(path: str) -> str:
    """Return where a file of the repository lies in the wheel."""
    folder = next(folder for folder in FOLDERS if path.startswith(folder))
    return FOLDERS[folder] + path.removeprefix(folder)


def only_record(runs: Path) -> Mapping[str, Any]:
    """Return the one run record that lies under ``runs``."""
    (path,) = runs.glob("*/*/run.json")
    record: Mapping[str, Any] = json.loads(path.read_text())
    return record
