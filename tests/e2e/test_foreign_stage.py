"""A stage of another package: installed beside offstage, it runs in place of generate, with keys of its own."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "offstage-echo"
version = "0.1.0"

[project.entry-points."offstage.stages"]
echo = "echo_stage:EchoStage"

[tool.hatch.build.targets.wheel]
include = ["echo_stage.py"]
"""

STAGE = '''
"""The likeliest next token, asked for again and again."""

import json
from dataclasses import dataclass, field
from typing import Literal

from offstage.pipeline.errors import Fault
from offstage.pipeline.stage import Report
from offstage.pipeline.typed_config import read


@dataclass(frozen=True, slots=True)
class Echo:
    times: int = 2
    prompt: list[int] = field(default_factory=lambda: [5, 6, 7])
    style: Literal["plain", "loud"] = "plain"
    share: float | None = None


@dataclass(frozen=True, slots=True)
class EchoConfig:
    echo: Echo = Echo()


@dataclass(frozen=True, slots=True)
class EchoInputs:
    weights: str
    echo: Echo


class EchoStage:
    name, version, needs, config_class = "echo", 1, ("dispatch",), EchoConfig

    def check(self, config):
        if read(EchoConfig, config).echo.times < 1:
            yield Fault("echo.times", "give a whole number from 1")

    def examine(self, config):
        return ()

    def gather(self, context):
        return EchoInputs(context.artifact("shard_load").key, read(EchoConfig, context.config).echo)

    def build(self, inputs, context, folder):
        import torch

        model, prompt = context.live("dispatch").model, torch.tensor([inputs.echo.prompt])
        with torch.no_grad():
            answers = [model(prompt).logits[0, -1].argmax() for _ in range(inputs.echo.times)]
        folder.joinpath("echo.json").write_text(json.dumps([int(answer) for answer in answers]))

    def revive(self, inputs, context):
        return None

    def report(self, artifact):
        tokens = artifact.json("echo.json")
        return Report(f"{len(tokens)} echoes", outputs=({"prompt": "", "text": None, "token_ids": tokens},))
'''


IN_TURN = """
import contextlib, io, json, sys
from pathlib import Path
from hydra.core.global_hydra import GlobalHydra
from offstage.pipeline.app import main
from offstage.pipeline.cache.sealed_files import write_sealed
from offstage.stages.machine.process_memory import FILE_NAME, identity

kept, told = Path("outputs/cache/hardware"), []
write_sealed(kept / FILE_NAME, {identity(): {"host": 300_000_000}})
for arguments in json.load(sys.stdin):
    GlobalHydra.instance().clear()
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            main(arguments)
        except SystemExit as ended:
            told.append([ended.code, said.getvalue()])
json.dump(told, sys.stdout)
"""
"""Runs the command again and again in one process, for the seconds of its imports; what that holds isn't measured."""


def run(command: list[object], folder: Path, given: str | None = None) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HYDRA"))}
    return subprocess.run(
        [str(part) for part in command], cwd=folder, env={**clean, "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=300, check=False, input=given,
    )  # fmt: skip


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with both packages; what they depend on is this environment's."""
    folder = tmp_path_factory.mktemp("fresh")
    package = folder / "offstage-echo"
    package.mkdir()
    package.joinpath("pyproject.toml").write_text(PYPROJECT)
    package.joinpath("echo_stage.py").write_text(STAGE)
    made = run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], folder)
    assert made.returncode == 0, made.stderr
    packages = next(folder.joinpath("venv").glob("lib/python*/site-packages"))
    others = [path for path in sys.path if path.endswith("site-packages") and path != sysconfig.get_path("purelib")]
    here = [sysconfig.get_path("purelib"), *others]
    packages.joinpath("others.pth").write_text("".join(f"{path}\n" for path in here))
    fresh = folder / "venv" / "bin" / "python"
    offline = ["-q", "--no-deps", "--no-index", "--no-build-isolation", "--no-compile", "--ignore-installed"]
    done = run([fresh, "-m", "pip", "install", *offline, package, ROOT], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return fresh


Ran = tuple[Path, list[tuple[int, str]]]
IN_PLACE = "stages=[empty_init,plan,shard_load,dispatch,echo]"


RUNS = [
    [IN_PLACE], [IN_PLACE, "echo.times=3"], [IN_PLACE, "echo.times=3"], [IN_PLACE, "echo.times=3", "echo.prompt=[9]"],
    ["stop_after=plan"],
]  # fmt: skip
REFUSED = [
    (["echo.tims=3"], ["echo.tims: unknown key", "did you mean 'times'"]),
    (["+echo.tims=3"], ["echo.tims: unknown key", "did you mean 'times'"]),
    (["ecko.times=3"], ["ecko.times: unknown key", "did you mean 'echo'"]),
    (["echo.times=many"], ["echo.times: 'many' is no whole number", "the default is 2"]),
    (["echo.times=true"], ["echo.times: True is no whole number"]),
    (["echo.style=loudly"], ["echo.style: 'loudly' is none of plain, loud", "did you mean 'loud'"]),
    (["echo.prompt=[5,x]"], ["echo.prompt: [5, 'x'] is no list of whole numbers"]),
    (["echo.share=half"], ["echo.share: 'half' is no number or null"]),
    (["echo=3"], ["echo: 3 is no group of the keys times, prompt, style, share"]),
    (["echo.times=0"], ["echo.times: give a whole number from 1"]),
]


@pytest.fixture(scope="module")
def ran(python: Path, described: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Return the folder of ``RUNS`` and those that are ``REFUSED``, and of each its exit code and what it said."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copytree(described / "hardware", folder / "outputs/cache/hardware")
    commands = [*RUNS, *([IN_PLACE, *arguments] for arguments, _ in REFUSED)]
    done = run([python, "-P", "-c", IN_TURN], folder, json.dumps(commands))
    assert done.returncode == 0, done.stderr
    return folder, [(code, said) for code, said in json.loads(done.stdout)]


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("outputs/runs/*/*/run.json"))]


def test_it_runs_in_place_of_generate_with_its_own_keys_and_is_cached_by_them(ran: Ran) -> None:
    folder, told = ran
    assert [code for code, _ in told[: len(RUNS)]] == [0] * len(RUNS), told
    first, three, again, other, _ = records(folder)[: len(RUNS)]
    assert [len(record["outputs"][0]["token_ids"]) for record in (first, three, again)] == [2, 3, 3]
    assert len(set(three["outputs"][0]["token_ids"])) == 1
    assert three["config"]["echo"] == {"times": 3, "prompt": [5, 6, 7], "style": "plain", "share": None}
    cached = [[stage["cached"] for stage in record["stages"]] for record in (first, three, again, other)]
    assert cached == [[False] * 5, [True] * 4 + [False], [True] * 5, [True] * 4 + [False]]


def test_its_keys_are_there_before_it_runs_and_do_not_disturb_a_run_without_it(
    python: Path, ran: Ran, tmp_path: Path
) -> None:
    shown = run([python.with_name("offstage"), "--cfg", "job"], tmp_path)
    assert "echo:\n  times: 2\n  prompt:\n  - 5" in shown.stdout, shown.stderr
    without = records(ran[0])[len(RUNS) - 1]
    assert [stage["name"] for stage in without["stages"]] == ["empty_init", "plan"]
    assert without["status"] == "completed"


def test_wrong_keys_and_types_are_refused_in_one_line(ran: Ran) -> None:
    _, told = ran
    for (code, said), (_, words) in zip(told[len(RUNS) :], REFUSED, strict=True):
        assert code == 2, said
        (line,) = said.splitlines()
        assert line.startswith("offstage: ")
        assert all(word in line for word in words), line
