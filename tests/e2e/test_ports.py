"""Scripts as users of accelerate write them, run with its functions and, only their imports changed, with ours.

Each is run twice, in processes of its own, and must print the same. All that are run with one of the two are forked
from one process, so that the libraries, which take longer than any script, are imported once.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUNNER = Path(__file__).with_name("run_scripts.py")
SCRIPTS = sorted((Path(__file__).parent / "ports").glob("*.py"))


def ported(text: str) -> str:
    """Return a script with the imports from accelerate's modules made from ``offstage``."""
    return re.sub(r"^from accelerate[\w.]* import", "from offstage import", text, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def accelerates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders in which the scripts were run as they are."""
    return run_all("accelerate", tmp_path_factory.mktemp("accelerate"))


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders in which they were run with their imports changed."""
    return run_all("offstage", tmp_path_factory.mktemp("offstage"))


def run_all(library: str, folder: Path) -> Path:
    for script in SCRIPTS:
        text = script.read_text()
        folder.joinpath(script.stem).mkdir()
        folder.joinpath(script.stem, "script.py").write_text(text if library == "accelerate" else ported(text))
    path = str(ROOT / ".src")
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    folders = [folder / script.stem for script in SCRIPTS]
    modules = f"torch,transformers.modeling_utils,transformers.generation.utils,{library}"
    subprocess.run([sys.executable, RUNNER, modules, *folders], env=env, check=True)
    return folder


def printed(folder: Path) -> str:
    """Return what a script printed; one that failed shows its traceback."""
    assert folder.joinpath("status").read_text() == "0", folder.joinpath("errors").read_text()
    return folder.joinpath("printed").read_text()


def test_there_are_fifteen_and_only_their_imports_name_accelerate() -> None:
    assert len(SCRIPTS) == 15
    for script in SCRIPTS:
        text = script.read_text()
        assert re.search("^from accelerate", text, flags=re.MULTILINE)
        assert "accelerate" not in ported(text)


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate isn't installed")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_prints_the_same_with_only_its_imports_changed(script: Path, accelerates: Path, ours: Path) -> None:
    expected = printed(accelerates / script.stem)
    assert printed(ours / script.stem) == expected
    assert expected


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is not None, reason="the scripts are run beside accelerate")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_ported_script_runs(script: Path, ours: Path) -> None:
    assert printed(ours / script.stem)
