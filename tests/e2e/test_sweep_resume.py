"""A sweep that was interrupted is finished in its folder, each job once; the long forms: tests.benchmarks.resume."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import enter, records_in, start, wait_for
from tests.e2e.test_own_sweeps import resume
from tests.e2e.test_sweep import job_processes

JOBS = ("-m", "seed=1,2,3", "generate=sample", "generate.max_new_tokens=100", "hydra.sweep.dir=outputs/a sweep")
"""Long enough for a job to be met while it runs: the seed is in each one's key."""

REFUSED = (
    "hydra.sweep.dir: {} holds another sweep: override 1 of job 2 is 'seed=3' there, 'seed=4' here; choose "
    "another folder, or go on with that one: offstage-sweep resume {}\n"
)


def statuses(folder: Path) -> dict[str, str]:
    return {path.parent.name: record["status"] for path, record in records_in(folder).items()}


def test_an_interrupted_sweep_is_finished_in_its_folder_and_no_job_runs_twice(
    fresh_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, jobs_fork: None
) -> None:
    sweep, lies = start(fresh_folder, *JOBS), fresh_folder / "outputs/a sweep"
    second = lies / "1/run.json"
    wait_for(lambda: second.exists() and json.loads(second.read_text())["stages"], sweep)  # its process is at work
    first = lies.joinpath("0/run.json").read_bytes()
    sweep.send_signal(signal.SIGINT)
    out, err = sweep.communicate(timeout=300)
    assert sweep.returncode == 130
    assert "Traceback" not in err
    assert list(job_processes(fresh_folder)) == []
    assert statuses(fresh_folder) == {"0": "completed", "1": "interrupted"}
    assert "1 of 3 completed, 1 interrupted, 1 not begun, outputs/a sweep" in out
    assert "to run what isn't completed: offstage-sweep resume 'outputs/a sweep'" in out
    assert "job 1  seed=2  is 2 of 3; about " in out
    assert enter(fresh_folder, *JOBS, "seed=1,2,4") == 2
    assert capfd.readouterr() == ("", f"offstage: {REFUSED.format(lies, lies)}")
    assert enter(fresh_folder, *JOBS, "dtype=float32") == 2
    assert "dtype is 'auto' there, 'float32' here" in capfd.readouterr().err
    monkeypatch.chdir("/")
    assert resume(lies) == 0
    out = capfd.readouterr().out
    assert "resumed: 1 of 3 completed, 1 interrupted, 1 not begun" in out
    assert "3 of 3 completed, outputs/a sweep" in out
    assert statuses(fresh_folder) == dict.fromkeys("012", "completed")
    assert lies.joinpath("0/run.json").read_bytes() == first
    assert sorted(path.relative_to(lies).as_posix() for path in lies.rglob("run-*.json")) == ["1/run-1.json"]


@pytest.mark.parametrize("quote", ["it's", "back\\slash", "end\\", "a=b,c"])
def test_any_folder_s_name_survives_hydra_s_grammar(quote: str) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    from offstage.pipeline.sweeps.command import _quoted

    (override,) = OverridesParser.create().parse_overrides([f"hydra.sweep.dir={_quoted(Path('/x') / quote)}"])
    assert override.value() == f"/x/{quote}"
