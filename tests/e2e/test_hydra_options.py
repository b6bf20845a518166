"""Hydra's own options: logging, reruns, sweeps over nothing, the printed config, output that nobody reads."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from tests.e2e.conftest import COMMAND, Finished, environment
from tests.long_form import in_part

Run = Callable[..., Finished]
DEEP = "[" * 400 + "]" * 400
HYDRAS = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
EMBEDDED = Path(__file__).parents[2] / "conf/checkpoints/tiny"


def run_folder(folder: Path) -> Path:
    (record,) = folder.glob("outputs/runs/*/*/run.json")
    return record.parent


def test_the_log_of_a_run_is_its_file_unless_another_is_chosen(offstage_here: Run, tmp_path: Path) -> None:
    done = offstage_here("stop_after=empty_init")
    assert done.code == 0, done.err
    assert " INFO offstage: completed" in run_folder(tmp_path).joinpath("run.log").read_text()


@pytest.mark.parametrize(
    ("chosen", "shown", "apart"), [("stdout", True, False), ("disabled", False, False), ("stdout", True, True)]
)
def test_each_logging_of_hydra_can_be_chosen_for_a_process_of_the_job_s_own_too(
    chosen: str, shown: bool, apart: bool, offstage_here: Run, tmp_path: Path
) -> None:
    own = ["enforce_memory=true"] if apart else []
    done = offstage_here("stop_after=empty_init", f"hydra/job_logging={chosen}", *own)
    assert done.code == 0, done.err
    assert ("completed\n" in done.out) is shown
    assert not run_folder(tmp_path).joinpath("run.log").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    in_part(
        [
            (["-m", "max_memory.cpu=glob(*)"], "this is none; list the values: max_memory.cpu=A,B"),
            (
                ["-m", "max_memory.cpu=glob(*)", "hydra/launcher=basic"],
                "this is none; list the values: max_memory.cpu=A,B",
            ),
            (
                ["-m", "generate=glob(x*)"],
                "generate: 'glob(x*)' matches no file of that group; there are greedy, sample",
            ),
            (["-m", "seed=range(5,1)", "device_map=auto,optimal"], "seed: 'range(5,1)' has no value"),
            (["hydra.job_logging.handlers.console.class=nowhere"], "hydra.job_logging: Unable to configure handler"),
            (
                ["-m", "hydra/launcher=joblib", "seed=1,2"],
                "offstage: hydra/launcher: 'a.plugin.JoblibLauncher' forgets",
            ),
            (
                ["-m", "seed=1", "hydra.sweeper.max_batch_size=0"],
                "hydra.sweeper.max_batch_size: 0 is no number of jobs",
            ),
            (["max_memory=2MB"], "offstage: max_memory: '2MB' names no device; give each its own size, as {cpu: 1GB}"),
            (["vars=3"], "offstage: vars: 3 is no mapping; give variables of your own with their names, as {lab: …}"),
            (["vars=null"], "offstage: vars: null is no mapping"),
            (["vars.x=???"], "offstage: vars.x: no value; give one: vars.x=…"),
            (["vars.x=[1,nan]"], "offstage: vars.x[1]: nan is no number of 64 bits"),
            ([f"vars.x={'[' * 60 + ']' * 60}"], "offstage: vars: nested more than 50 deep; nest it less"),
            (
                ["+lab.x=1"],
                "lab: unknown key; offstage --cfg job shows every key, and variables of your own stand below",
            ),
            (
                ["generate.prompts.a=hi"],
                "offstage: generate.prompts.a=hi: generate.prompts is a list of 1, whose elements go by numbers from 0",
            ),
            (["stages.plan.x=1"], "offstage: stages.plan.x=1: stages is a list of "),
            (["+stages.x=1"], "offstage: +stages.x=1: stages is a list of "),
            (["stages.70=plan"], "give one that is there, as stages.0=VALUE, or the whole list, stages=[A,B]"),
            (["~stages.0"], "offstage: ~stages.0: no element is taken out of a list; give the list without it"),
            (["max_memory=[2MB]"], "offstage: max_memory: a list names no device; give each its own size"),
            (["max_memory.cpu=null"], "offstage: max_memory.cpu: null is no size; give one, or leave the key out"),
            (
                ["~max_memory"],
                "offstage: max_memory: a run goes by this key; leave out ~max_memory, and it has its default",
            ),
            (["~model"], "offstage: model.kind: None is no kind of model"),
            ([f"generate.stop_strings={DEEP}"], "offstage: generate.stop_strings: nested too deep to be read"),
            (["-m", "seed=1", "hydra.sweeper._target_=a.Sweeper"], "Invalid plugin 'a.Sweeper'"),
            (
                ["-m", "seed=1", f"hydra.sweeper._target_={HYDRAS}"],
                "hydra/sweeper: a sweeper of another package starts",
            ),
            (["-sc", "stop_after=plan"], "Expecting one subcommand from ['install', 'uninstall', 'query']"),
        ]
    ),
)
def test_what_cannot_be_done_is_one_line_and_nothing_runs(
    arguments: list[str], words: str, offstage_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launchers, node = ConfigStore.instance().repo["hydra"]["launcher"], {"_target_": "a.plugin.JoblibLauncher"}
    another = replace(launchers["basic.yaml"], name="joblib.yaml", node=OmegaConf.create(node))
    monkeypatch.setitem(launchers, "joblib.yaml", another)
    done = offstage_here(*arguments)
    assert (done.code, done.out) == (2, ""), done.err
    assert words in done.err
    assert "unforeseen" not in done.err
    ran = [json.loads(path.read_text())["stages"] for path in tmp_path.glob("outputs/runs/*/*/run.json")]
    assert not [*tmp_path.glob("outputs/multirun/*/*"), *filter(None, ran)]


@pytest.mark.parametrize(
    ("text", "words"),
    in_part(
        [
            (
                "seed: [1",
                "mine.yaml, line 1, column 9: expected ',' or ']', but got '<stream end>'; while",
            ),
            ("seed: 1", "the config has no such key, nor "),
            ("# \u00fc\nseed: 1", "mine.yaml' can't be read as a config file in UTF-8: UnicodeDecodeError"),
            (
                'defaults: ["a\\0b"]',
                r"'a\x00b' can't be read as a config file in UTF-8: ValueError: embedded null byte",
            ),
            ("defaults: [{'': config}]", "mine' can't be read as a config file in UTF-8: AssertionError"),
            ("defaults: [config, _self_]\nmax_memory: 2MB", "mine.yaml names no device; give each its own size"),
            (
                "defaults: [config, _self_]\nmax_memory: {cpu: null}",
                "mine.yaml is no size; give one, or leave the key out",
            ),
            ("defaults: [config, model: own, _self_]", "model: 'own' is no file of that group; there are"),
            (
                "defaults: [config, _self_]\nlab: {disk: 1GB}",
                "of your own stand below vars: {vars: {lab: …}}, used as ${v",
            ),
            (
                "defaults: [config, _self_]\nvars: {x: !!binary aGk=}",
                "offstage: vars.x: b'hi' are bytes, which no record",
            ),
            (
                f"defaults: [config, _self_]\ngenerate: {{stop_strings: {DEEP}}}",
                "a config file: nested too deep to be read",
            ),
        ]
    ),
)
def test_a_config_file_that_is_none_is_one_line(text: str, words: str, offstage_here: Run, tmp_path: Path) -> None:
    tmp_path.joinpath("mine.yaml").write_text(text, encoding="latin-1")
    done = offstage_here("--config-dir", str(tmp_path), "--config-name", "mine", "hydra.run.dir=.")
    assert (done.code, done.out) == (2, ""), done.err
    assert words in done.err
    assert "unforeseen" not in done.err


def test_an_experiment_without_its_package_is_told_the_line_that_it_lacks(offstage_here: Run, tmp_path: Path) -> None:
    tmp_path.joinpath("experiment").mkdir()
    tmp_path.joinpath("experiment/own.yaml").write_text("seed: 1\n")
    done = offstage_here("--config-dir", str(tmp_path), "experiment=own")
    assert (done.code, done.out) == (2, "")
    assert "own.yaml has no header, so that its keys (seed) landed below 'experiment'" in done.err
    assert "write '# @package _global_' as its first line" in done.err


def test_a_job_of_a_sweep_that_names_no_stage_is_refused_as_a_run_is(offstage_here: Run) -> None:
    done = offstage_here("-m", "stages=[nope]")
    assert done.code == 2, done.err
    assert "stages: 'nope' is no stage; installed are dispatch" in done.out
    assert "unforeseen" not in done.err


def test_a_shell_is_told_the_devices_by_their_names(offstage_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMP_LINE", "offstage max_memory.")
    done = offstage_here("-sc", "query=bash")
    assert (done.code, done.out.split()) == (0, ["max_memory.0=", "max_memory.cpu="])


def test_the_help_names_a_command_that_prints_the_config_resolved(offstage_here: Run) -> None:
    shown = re.search(r"offstage (--cfg .*?)  +the whole config", offstage_here("--help").out)
    assert shown, "the help says how"
    given = ("max_memory.cpu=2MB", "generate.max_new_tokens=7")
    resolved = offstage_here(*shown[1].split(), *given).out
    assert "${" not in resolved
    assert "min_new_tokens: 7" in resolved
    path = next(line for line in resolved.splitlines() if line.startswith("  path: "))
    assert Path(path.removeprefix("  path: "), "config.json").is_file()


@pytest.mark.parametrize("apart", [False, True], ids=["in this process", "in one of its own"])
def test_the_run_s_folder_as_the_current_one_changes_what_no_path_means(
    apart: bool, offstage_here: Run, tmp_path: Path
) -> None:
    own = ["enforce_memory=true"] if apart else []
    shutil.copytree(EMBEDDED, tmp_path / "checkpoint")
    tmp_path.joinpath("map.json").write_text('{"": "disk"}')
    given = ("model.path=checkpoint", "device_map=map.json", "max_memory.cpu=3MB", "stop_after=plan", *own)
    done = offstage_here("hydra.job.chdir=true", *given)
    assert done.code == 0, done.err
    assert done.record["config"]["model"]["path"] == str(tmp_path / "checkpoint")
    assert done.record["stages"][0]["artifact"].startswith(str(tmp_path / "outputs/cache"))
    assert f"2 stages in {done.out.rpartition(' in ')[2].partition(',')[0]}, {run_folder(tmp_path)}\n" in done.out
    assert Path.cwd() == tmp_path


@pytest.mark.parametrize("asked", ["-sc install=bash", "--help"])
def test_output_that_nobody_reads_is_no_fault(asked: str, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*COMMAND, *asked.split()], cwd=tmp_path, env=environment(), stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")
