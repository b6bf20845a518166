"""A stage of another package: installed beside offstage, it runs in place of generate, with keys of its own.

So does the one that the page about such stages shows.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from offstage.pipeline.installed_stages import installed_stages
from offstage.pipeline.record import RunRecord
from offstage.pipeline.report.command import run as report
from offstage.pipeline.tracking.tracked_run import TrackedRun

ROOT = Path(__file__).parents[2]
PAGE = ROOT / ".github" / "EXTENDING.md"

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
from offstage.pipeline.metrics import Metric
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
    metrics = (
        Metric("echo_time", "seconds", "echoing", leads=True),
        Metric("planned_echo_time", "seconds", "echoing", kind="predicted", of="echo_time"),
        Metric("alike", "share", "echoes alike"),
        Metric("loudness", "shouts/s", "loudness"),
        Metric("mood", "word", "mood"),
        Metric("silences", "count", optional=True),
    )

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
        metrics = {
            "echo_time": len(tokens) / 4, "planned_echo_time": 0.25, "alike": 1 / len(tokens), "loudness": 12,
            "mood": "calm", "whispers": len(tokens),
        }
        outputs = ({"prompt": "", "text": None, "token_ids": tokens},)
        return Report(f"{len(tokens)} echoes", metrics=metrics, outputs=outputs)
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
    said, shown = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(shown):
        try:
            main(arguments)
        except SystemExit as ended:
            told.append([ended.code, said.getvalue(), shown.getvalue()])
json.dump(told, sys.stdout)
"""
"""Runs the command again and again in one process, for the seconds of its imports; what that holds isn't measured."""


def run(command: list[object], folder: Path, given: str | None = None) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HYDRA"))}
    return subprocess.run(
        [str(part) for part in command], cwd=folder, env={**clean, "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=300, check=False, input=given,
    )  # fmt: skip


def package_on_the_page(folder: Path) -> Path:
    """Return the package whose files ``EXTENDING.md`` shows, written below ``folder``."""
    package = folder / "offstage-census"
    package.mkdir()
    files = re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert [name for name, _ in files] == ["pyproject.toml", "census_stage.py"]
    for name, text in files:
        package.joinpath(name).write_text(text)
    return package


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
    fresh, shown = folder / "venv" / "bin" / "python", package_on_the_page(folder)
    offline = ["-q", "--no-deps", "--no-index", "--no-build-isolation", "--no-compile", "--ignore-installed"]
    done = run([fresh, "-m", "pip", "install", *offline, package, shown, ROOT], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return fresh


Ran = tuple[Path, list[tuple[int, str, str]]]
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
    (["objective.metric=echo_tim"], ["objective.metric: 'echo_tim' names no number", "did you mean 'echo_time'"]),
    (["objective.metric=mood"], ["objective.metric: 'mood' names no number"]),
    (["objective.metric=whispers"], ["objective.metric: 'whispers' names no number", "a metric that a stage declares"]),
]
SEARCH = [
    "-m", IN_PLACE, "hydra/sweeper=optuna", "hydra/launcher=basic", "hydra.sweeper.n_trials=2",
    "hydra.sweeper.direction=minimize", "objective.metric=echo_time", "objective.at_most.alike=0.75",
    "echo.times=choice(2,3)",
]  # fmt: skip
"""What this process, which has no such stage, is to read: the records of its jobs."""


@pytest.fixture(scope="module")
def ran(python: Path, described: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Return the folder of ``RUNS`` and those that are ``REFUSED``, and of each its exit code and what it said."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copytree(described / "hardware", folder / "outputs/cache/hardware")
    commands = [*RUNS, *([IN_PLACE, *arguments] for arguments, _ in REFUSED), SEARCH]
    done = run([python, "-P", "-c", IN_TURN], folder, json.dumps(commands))
    assert done.returncode == 0, done.stderr
    return folder, [(code, said, shown) for code, said, shown in json.loads(done.stdout)]


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("outputs/runs/*/*/run.json"))]


def test_it_runs_in_place_of_generate_with_its_own_keys_and_is_cached_by_them(ran: Ran) -> None:
    folder, outcomes = ran
    assert [code for code, *_ in outcomes[: len(RUNS)]] == [0] * len(RUNS), outcomes
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


@pytest.mark.long_form
def test_the_stage_on_the_page_does_what_the_page_says(python: Path, tmp_path: Path) -> None:
    (command,) = re.findall(r"^\$ (offstage .*)$", PAGE.read_text(), re.MULTILINE)
    offstage, *arguments = shlex.split(command)
    done = run([python.with_name(offstage), *arguments], tmp_path)
    assert done.returncode == 0, done.stderr
    (record,) = records(tmp_path)
    assert record["stages"][-1]["name"] == "census"
    assert 0 < record["metrics"]["counted_bytes"] < 7_477_760, "norms are smaller than that"
    assert f"torch.bfloat16 {record['metrics']['counted_bytes']}" in done.stdout
    refused = run([python.with_name(offstage), *arguments[:1], "census.at_least=-1"], tmp_path)
    assert (refused.returncode, refused.stderr) == (2, "offstage: census.at_least: give a number of bytes from 0\n")


def test_wrong_keys_and_types_are_refused_in_one_line(ran: Ran) -> None:
    _, outcomes = ran
    for (code, said, _), (_, words) in zip(outcomes[len(RUNS) : -1], REFUSED, strict=True):
        assert code == 2, said
        (line,) = said.splitlines()
        assert line.startswith("offstage: ")
        assert all(word in line for word in words), line


def lines(shown: str) -> list[str]:
    """Return the lines of ``shown``, their words with single spaces between."""
    return [" ".join(line.split()) for line in shown.splitlines()]


def test_what_it_measures_stands_in_the_closing_table_beside_what_was_predicted(ran: Ran) -> None:
    shown = lines(ran[1][0][2])
    assert {"echoing 500.0 ms 250.0 ms", "echoes alike 50.0 %", "loudness 12.00 shouts/s", "mood calm"} <= set(shown)


def test_its_record_says_what_its_metrics_are(ran: Ran) -> None:
    first, *_ = records(ran[0])
    assert first["metric_table"]["alike"] == {"unit": "share", "title": "echoes alike"}
    assert "whispers" not in first["metric_table"], "nobody declared it"
    assert (first["metrics"]["whispers"], first["metrics"]["peak_host_bytes"] > 0) == (2, True)
    assert "silences" not in first["metrics"], "it is optional"


def test_a_sweep_shows_what_leads_and_a_search_goes_by_it(ran: Ran) -> None:
    code, said, shown = ran[1][-1]
    assert code == 0, said
    assert any(line.startswith("job overrides status echoing host peak") for line in lines(shown)), shown
    assert "500.0 ms" in shown
    assert "750.0 ms" in shown
    assert "echo_time 500.0 ms, alike 50.0 % (at most 75.0 %)" in shown


def test_who_receives_its_records_reads_its_metrics_without_the_package(
    ran: Ran, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "echo" not in installed_stages()
    (sweep,) = ran[0].glob("outputs/multirun/*/*")
    report([str(sweep), "--output", str(tmp_path)])
    shown, page = capsys.readouterr().out, (tmp_path / "report.html").read_text()
    for heading in ("echoing", "echoing, predicted", "echoes alike", "loudness", "mood"):
        assert heading in shown, shown
        assert heading in page
    assert "shouts/s" in page
    headings, *rows = (tmp_path / "report.csv").read_text().splitlines()
    assert {"metrics.echo_time", "metrics.alike", "metrics.mood", "metrics.whispers"} <= set(headings.split(","))
    assert len(rows) == 2
    units = json.loads((tmp_path / "report.json").read_text())["jobs"][0]["units"]
    assert (units["echo_time"], units["alike"], units["whispers"]) == ("seconds", "share", "count")
    two, three = sorted(sweep.glob("*/run.json"), key=lambda path: json.loads(path.read_text())["metrics"]["echo_time"])
    report(["--compare", str(two.parent), str(three.parent), "--output", str(tmp_path / "compared")])
    compared = lines(capsys.readouterr().out)
    assert {"echo_time 500.0 ms 750.0 ms 1.50", "alike 50.0 % 33.3 % 0.67", "whispers 2 3 1.50"} <= set(compared)


def test_a_tracker_is_told_its_metrics(ran: Ran) -> None:
    path, *_ = sorted(ran[0].glob("outputs/runs/*/*/run.json"))
    metrics = {point.name: point.value for point in TrackedRun.of(RunRecord.load(path)).points}
    assert (metrics["echo_time"], metrics["alike"], metrics["loudness"]) == (0.5, 0.5, 12.0)
