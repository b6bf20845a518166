"""Sweeps: a fresh process a job, one at a time; what happens to one job is nothing to the others."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from datetime import datetime
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
import pytest
from omegaconf import OmegaConf

from offstage.pipeline.memory_cgroups import CapError
from tests.benchmarks.caps import can_cap
from tests.e2e.conftest import Finished, enter, finish, forked_jobs, records_in, start

Run = Callable[..., Finished]
SLOW = "max_memory.cpu=1.9MB"
DTYPES, GIVEN = ("float32", "bfloat16"), ("generate.max_new_tokens=2",)
LONG = (2001, 2002)
"""Tokens of a job that runs long enough to be hit."""


def job_processes(folder: Path) -> Iterator[psutil.Process]:
    """Yield the processes in which a job of a sweep below ``folder`` works."""
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if words[1:3] == ["-P", "-c"] and any(str(folder) in word for word in words):
            yield process


def working_job(folder: Path, number: int, *, seconds: float = 250) -> psutil.Process:
    """Return the process of the job ``number`` once it generates."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        logs = list(folder.glob(f"outputs/multirun/*/*/{number}/run.log"))
        if logs and "generate: begins" in logs[0].read_text():  # to look through all processes takes longer
            processes = [each for each in job_processes(folder) if f"/{number}" in " ".join(each.cmdline())]
            if processes:
                return processes[0]
        time.sleep(0.05)
    raise AssertionError(f"job {number} never generated")


def by_number(folder: Path) -> dict[int, dict[str, Any]]:
    return {int(path.parent.name): record for path, record in records_in(folder).items()}


@pytest.mark.long_form
def test_killed_interrupted_and_refused_jobs_leave_the_others_alone(fresh_folder: Path) -> None:
    lengths = ",".join(map(str, (*LONG, "none_at_all", 3)))
    sweep = start(fresh_folder, "-m", SLOW, f"generate.max_new_tokens={lengths}")
    working_job(fresh_folder, 0).kill()
    working_job(fresh_folder, 1).send_signal(signal.SIGINT)
    done = finish(sweep, fresh_folder, {})
    assert done.code == 137, done.err
    records = by_number(fresh_folder)
    assert [records[n]["status"] for n in range(4)] == ["failed", "interrupted", "failed", "completed"]
    assert "SIGKILL" in records[0]["error"]["message"]
    assert records[0]["error"]["stage"] == "generate"
    assert "generate.max_new_tokens" in records[2]["error"]["message"]
    table = done.out[done.out.index("job  overrides") :]
    assert "killed by SIGKILL" in table
    assert "1 of 4 completed, 2 failed, 1 interrupted" in table
    assert "Traceback" not in done.err + done.out
    assert list(job_processes(fresh_folder)) == []


@pytest.fixture(scope="module", params=["basic", pytest.param("local", marks=pytest.mark.long_form)])
def experiment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """Return the folder in which an experiment was run, with two of its dtypes and two budgets; and what came of it."""
    folder = tmp_path_factory.mktemp("experiment")
    given = ("experiment=precision", f'hydra.sweeper.params.dtype="{",".join(DTYPES)}"', *GIVEN)
    arguments = (*given, "max_memory.cpu=3.8MB,8MB", f"hydra/launcher={request.param}")
    if request.param == "local":
        return folder, finish(start(folder, *arguments), folder, {})
    with forked_jobs(), redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        code = enter(folder, *arguments)
    return folder, Finished(code, out.getvalue(), err.getvalue(), [*records_in(folder).values()])


def test_an_experiment_is_a_whole_sweep(experiment: tuple[Path, Finished]) -> None:
    _, done = experiment
    assert done.code == 0, done.err
    asked = [(record["config"]["dtype"], record["config"]["max_memory"]["cpu"]) for record in done.records]
    assert sorted(asked) == [(dtype, budget) for dtype in sorted(DTYPES) for budget in ("3.8MB", "8MB")]
    assert "4 of 4 completed" in done.out


def test_a_sweep_shares_what_its_jobs_have_in_common(experiment: tuple[Path, Finished]) -> None:
    _, done = experiment
    outputs = {(record["config"]["dtype"], json.dumps(record["outputs"])) for record in done.records}
    assert len(outputs) == len(DTYPES), "under both budgets the tokens are the same"
    computed = [stage["name"] for record in done.records for stage in record["stages"] if not stage["cached"]]
    assert computed.count("empty_init") == len(DTYPES)
    assert computed.count("generate") == 4, "each placement is measured"


def test_all_jobs_plan_by_the_rates_that_were_measured_before_the_first(experiment: tuple[Path, Finished]) -> None:
    folder, done = experiment
    plans = [stage for record in done.records for stage in record["stages"] if stage["name"] == "plan"]
    assert len({json.dumps(plan["inputs"]["rates"]) for plan in plans}) == 1
    kept = folder / "outputs/cache/hardware/decoding.json"
    begun = min(datetime.fromisoformat(record["started"]).timestamp() for record in done.records)
    assert kept.stat().st_mtime < begun


def test_every_job_has_a_folder_with_its_overrides_and_its_log(experiment: tuple[Path, Finished]) -> None:
    folder, _ = experiment
    jobs = list(folder.glob("outputs/multirun/*/*/[0123]"))
    assert len(jobs) == 4
    for job in jobs:
        assert job.joinpath(".hydra", "overrides.yaml").is_file()
        log = job.joinpath("run.log").read_text()
        assert "generate: ends after" in log
        assert "\x1b" not in log


def test_the_folders_of_a_sweep_are_those_of_the_design(experiment: tuple[Path, Finished]) -> None:
    (path,) = experiment[0].glob("outputs/multirun/*/*/0/run.json")
    record = json.loads(path.read_text())
    own = {override for override in record["overrides"] if not override.startswith("hydra/launcher=")}
    assert own == {"experiment=precision", *GIVEN, "dtype=float32", "max_memory.cpu=3.8MB"}
    assert record["status"] == "completed"


def test_a_job_that_cannot_be_composed_ends_the_sweep_before_it_begins(offstage: Run, tmp_path: Path) -> None:
    done = offstage("-m", "generate=greedy,sampled")
    assert done.code == 2
    assert "generate: 'sampled' is no file of that group (did you mean 'sample'?)" in done.err
    assert done.records == []


@pytest.mark.long_form
def test_an_interrupted_sweep_leaves_no_process_and_no_open_record(fresh_folder: Path) -> None:
    """As the one of ``test_sweep_resume``."""
    sweep = start(fresh_folder, "-m", SLOW, "generate.max_new_tokens=2001,2002")
    working_job(fresh_folder, 0)
    sweep.send_signal(signal.SIGINT)
    done = finish(sweep, fresh_folder, {})
    assert done.code == 130
    assert [record["status"] for record in done.records] == ["interrupted"]
    assert list(job_processes(fresh_folder)) == []
    assert "Traceback" not in done.err


@pytest.mark.long_form
def test_a_job_ends_when_nobody_waits_for_it_any_more(fresh_folder: Path) -> None:
    sweep = start(fresh_folder, "-m", SLOW, "generate.max_new_tokens=2001")
    job = working_job(fresh_folder, 0)
    sweep.kill()
    job.wait(120)
    done = finish(sweep, fresh_folder, {})
    assert done.code != 0
    assert done.record["status"] == "interrupted"


GREEDY = """
import torch

class Greedy(torch.nn.Module):
    def __init__(self, words=32, width=16):
        super().__init__()
        self.embed = torch.nn.Embedding(words, width)
        self.head = torch.nn.Linear(width, words)

    def forward(self, tokens):
        if tokens.device.type == "cpu":
            self.held = torch.ones(1_200_000_000, dtype=torch.uint8)
        return self.head(self.embed(tokens))
"""


@pytest.fixture
def greedy(tmp_path: Path) -> list[str]:
    """The arguments for a model that holds far more than its weights."""
    from safetensors.torch import save_file
    from torch import nn

    tmp_path.joinpath("greedy.py").write_text(GREEDY)
    parts = {"embed": nn.Embedding(32, 16), "head": nn.Linear(16, 32)}
    tensors = {f"{name}.{key}": value for name, part in parts.items() for key, value in part.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    return [
        "model=module", "model._target_=greedy.Greedy", "model.path=.", "generate.prompts=[[3,4]]",
        "generate.max_new_tokens=2", "enforce_memory=true",
    ]  # fmt: skip


@pytest.mark.long_form
@pytest.mark.skipif(not can_cap(), reason="this process may not make memory groups")
def test_a_job_that_needs_more_than_its_plan_is_ended_by_its_cap(offstage_here: Run, greedy: list[str]) -> None:
    done = offstage_here("-m", "hydra/launcher=basic", "max_memory.cpu=1MB", *greedy)
    assert done.code == 137, done.err
    assert "memory cap" in done.out
    assert done.record["enforcement"]["enforced"]
    assert done.record["enforcement"]["bytes"] >= done.record["memory"]["predicted"]["cpu"]
    assert done.record["error"]["stage"] == "generate"


@pytest.mark.long_form
@pytest.mark.skipif(not can_cap(), reason="this process may not make memory groups")
def test_a_run_that_keeps_to_its_plan_completes_under_its_cap(offstage_here: Run) -> None:
    """As the mixture of ``test_predictions`` does, and a training of ``test_finetune``."""
    done = offstage_here("enforce_memory=true", "generate.max_new_tokens=3")
    assert done.code == 0, done.err
    assert done.record["enforcement"]["enforced"]
    assert done.record["outputs"][0]["prompt"] in done.out


@pytest.mark.usefixtures("jobs_fork")
def test_a_cap_that_cannot_be_had_is_said(monkeypatch: pytest.MonkeyPatch, offstage_here: Run) -> None:
    import offstage.pipeline.job_process as supervise

    def refuse() -> None:
        raise CapError("no memory controller is mounted here")

    monkeypatch.setattr(supervise, "make_group", refuse)
    done = offstage_here("enforce_memory=true", "generate.max_new_tokens=2")
    assert done.code == 0
    assert done.record["enforcement"] == {
        "enforced": False, "bytes": None, "how": "no memory controller is mounted here"
    }  # fmt: skip
    assert "not capped" in done.err
    assert "\nno memory cap was tested: no memory controller is mounted here\n" in done.out


@pytest.mark.skipif(not can_cap(), reason="this process may not make memory groups")
@pytest.mark.parametrize("first", [True, False], ids=["made", "served"])
def test_a_run_that_loads_nothing_says_that_no_cap_was_tested(first: bool, offstage_here: Run) -> None:
    if not first:
        assert offstage_here("stop_after=plan").code == 0
    done = offstage_here("enforce_memory=true", "stop_after=plan")
    assert done.code == 0, done.err
    why = "no stage came after the plan" if first else "served from the cache"
    assert f"\nno memory cap was tested: nothing was loaded: {why}\n" in done.out
    assert done.record["enforcement"]["how"] == f"nothing was loaded: {why}"


@pytest.mark.usefixtures("jobs_fork")
def test_a_job_has_hydra_s_files_and_the_variables_that_hydra_sets(offstage_here: Run, tmp_path: Path) -> None:
    """The sweep's own environment is as it was, and what a job printed lies in its folder."""
    seen = ("vars.seen=${oc.env:SEEN}", "+hydra.job.env_set.SEEN=here", "hydra.sweep.dir=outputs/it", "seed=4,5")
    done = offstage_here("-m", "stop_after=empty_init", *seen)
    assert done.code == 0, done.err
    assert [record["config"]["vars"]["seen"] for record in done.records] == ["here"] * 2
    assert "SEEN" not in os.environ
    for number, job in ((0, tmp_path / "outputs/it/0"), (1, tmp_path / "outputs/it/1")):
        assert OmegaConf.load(job / ".hydra/overrides.yaml")[-1] == f"seed={4 + number}"
        assert OmegaConf.load(job / ".hydra/config.yaml").seed == 4 + number
        hydra = OmegaConf.load(job / ".hydra/hydra.yaml").hydra
        assert (hydra.job.num, hydra.runtime.output_dir) == (number, str(job))
        assert "1 stage in" in job.joinpath("screen.log").read_text()
