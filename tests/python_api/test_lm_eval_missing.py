"""``offstage.lm_eval`` where lm-eval isn't installed: one line says so, and what to install."""

import subprocess
import sys

import pytest

SAID = "offstage.lm_eval needs lm_eval, which isn't installed: pip install 'offstage-pipeline[lm-eval]'"
WITHOUT = "import runpy, sys; sys.modules['lm_eval'] = None; "


@pytest.mark.parametrize(
    ("used", "lines"),
    [("runpy.run_module('offstage.lm_eval', run_name='__main__')", 1), ("import offstage.lm_eval", None)],
    ids=["as a command", "imported"],
)
def test_it_is_refused_with_what_to_install(used: str, lines: int | None) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT + used], capture_output=True, text=True, check=False)
    assert done.returncode == (2 if lines else 1)
    assert done.stderr.splitlines()[-1].endswith(SAID)
    assert lines is None or done.stderr.count("\n") == lines
