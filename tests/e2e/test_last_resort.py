"""What nobody foresaw: one line, exit code 70, where the traceback lies, and a record that says that the run failed."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.e2e.conftest import COMMAND, environment, records_in

STAGE = '''
"""A stage with a fault of its own."""

from dataclasses import dataclass


class Panic(BaseException):
    """What a panic in Rust becomes: no Exception."""


@dataclass(frozen=True)
class Inputs:
    nothing: int = 0


@dataclass(frozen=True)
class Keys:
    pass


class BrokenStage:
    name, version, needs, config_class = "broken", 1, (), Keys

    def check(self, config):
        return ()

    def examine(self, config):
        return ()

    def gather(self, context):
        return Inputs()

    def build(self, inputs, context, folder):
        raise RAISED
'''
RAISED = {
    "an error": ("RuntimeError('not so\\n\\nin two lines')", "RuntimeError: not so in two lines"),
    "a panic": ("Panic('index out of bounds')", "Panic: index out of bounds"),
    "no words": ("MemoryError()", "MemoryError"),
    "deep recursion": ("RecursionError('maximum recursion depth exceeded')", "RecursionError: maximum"),
}


def run_broken(
    folder: Path, raised: str, *arguments: str, extra: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a stage that raises ``raised``, installed as another package would be, in ``folder``."""
    package = folder / "package"
    installed = package / "broken-1.dist-info"
    installed.mkdir(parents=True)
    installed.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    installed.joinpath("entry_points.txt").write_text("[offstage.stages]\nbroken = broken_stage:BrokenStage\n")
    package.joinpath("broken_stage.py").write_text(STAGE.replace("RAISED", raised))
    path = os.pathsep.join(filter(None, (str(package), os.environ.get("PYTHONPATH", ""))))
    return subprocess.run(
        [*COMMAND, *arguments, "stages=[broken]"], cwd=folder, env=environment({"PYTHONPATH": path, **extra}),
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("kind", RAISED)
def test_what_nobody_foresaw_is_one_line_and_its_traceback_is_kept(kind: str, tmp_path: Path) -> None:
    raised, words = RAISED[kind]
    done = run_broken(tmp_path, raised, extra={})
    assert done.returncode == 70, done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"offstage: unforeseen: {words}")
    ((path, record),) = records_in(tmp_path).items()
    assert f"its traceback is in {path.with_name('run.log')}; please report it" in done.stderr
    log = path.with_name("run.log").read_text()
    assert log.count("Traceback") == 1
    assert "broken_stage.py" in log
    assert (record["status"], record["error"]["stage"]) == ("failed", "broken")
    assert not list(tmp_path.glob("outputs/cache/*/.tmp-*"))


def test_whoever_asks_for_it_sees_the_traceback(tmp_path: Path) -> None:
    done = run_broken(tmp_path, "RuntimeError('not so')", extra={"HYDRA_FULL_ERROR": "1"})
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert [record["status"] for record in records_in(tmp_path).values()] == ["failed"]


def test_a_job_of_a_sweep_that_fails_so_ends_like_a_run(tmp_path: Path) -> None:
    done = run_broken(tmp_path, "RuntimeError('not so')", "-m", "seed=1,2", "hydra/launcher=basic", extra={})
    assert done.returncode == 70, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    ended = [line for line in done.stdout.splitlines() if "failed in" in line]
    assert [line.partition("broken: ")[2].split(";")[0] for line in ended] == ["not so"] * 2, done.stdout
    records = records_in(tmp_path)
    assert [record["status"] for record in records.values()] == ["failed"] * 2
    assert all(path.with_name("run.log").read_text().count("Traceback") == 1 for path in records)
