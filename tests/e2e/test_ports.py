"""Scripts as users of accelerate write them, run with its functions and, only their imports changed, with ours.

Each is run twice, in processes of its own, and must print the same.
"""

import importlib.util
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((Path(__file__).parent / "ports").glob("*.py"))


def ported(text: str) -> str:
    """Return a script with the imports from accelerate's modules made from ``offstage``."""
    return re.sub(r"^from accelerate[\w.]* import", "from offstage import", text, flags=re.MULTILINE)


def printed(text: str, folder: Path) -> str:
    """Return what a script prints that is run in an empty folder; one that fails shows its traceback."""
    folder.mkdir()
    (folder / "script.py").write_text(text)
    path = os.pathsep.join([str(ROOT), str(ROOT / "stages/python_api")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "script.py"], cwd=folder, env=env, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_are_sixteen_and_only_their_imports_name_accelerate() -> None:
    assert len(SCRIPTS) == 16
    for script in SCRIPTS:
        text = script.read_text()
        assert re.search("^from accelerate", text, flags=re.MULTILINE)
        assert "accelerate" not in ported(text)


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate isn't installed")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_prints_the_same_with_only_its_imports_changed(script: Path, tmp_path: Path) -> None:
    text = script.read_text()
    with ThreadPoolExecutor(2) as pool:
        expected = pool.submit(printed, text, tmp_path / "accelerate")
        found = pool.submit(printed, ported(text), tmp_path / "offstage")
    assert found.result() == expected.result()
    assert expected.result()


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is not None, reason="the scripts are run beside accelerate")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_ported_script_runs(script: Path, tmp_path: Path) -> None:
    assert printed(ported(script.read_text()), tmp_path / "offstage")
