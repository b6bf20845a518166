"""The fuzzer in short: a few seeded cases of each format; ``python -m tests.fuzz`` tries as many as one asks for."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.__main__ import ROOT, with_tests
from tests.fuzz.catalogue import FORMATS
from tests.fuzz.workers import make_case
from tests.long_form import in_ci

SHORT, LONG = (3, 0), (1000, 50)
"""How many cases of each format, and in how many of these there is one of a whole command."""


@pytest.mark.parametrize(("cases", "share"), in_ci(SHORT, of=[SHORT, LONG]))
def test_no_changed_input_gives_a_wrong_answer_a_traceback_or_a_hang(cases: int, share: int, tmp_path: Path) -> None:
    asked = ["--cases", str(cases), "--share", str(share), "--seed", "1", "--save", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.fuzz", *asked],
        cwd=ROOT, env=with_tests(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f" {cases} cases") > 10


def test_the_same_seed_gives_the_same_cases() -> None:
    kind = FORMATS["artifact"]
    whole = {"plan/a/manifest.json": b'{"files": {"a": [1, 2]}}', "plan/b/manifest.json": b'{"key": "b"}'}
    for number in range(50):
        once, again = (make_case(kind, whole, seed=3, number=number) for _ in range(2))
        assert once == again
    assert len({make_case(kind, whole, seed=3, number=number).content for number in range(50)}) > 25
