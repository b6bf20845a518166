"""Jobs on this machine, so many at a time: what each came to is told, and an interrupt ends all that are at work."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Timer

import pytest
from omegaconf import OmegaConf

from offstage.pipeline import job_process
from offstage.pipeline.cache.locks import lock
from offstage.pipeline.record import RunRecord
from offstage.pipeline.sweeps.job_run import PreparedJob
from offstage.pipeline.sweeps.local_jobs import LocalJobs
from offstage.pipeline.sweeps.progress import SweepProgress
from offstage.pipeline.sweeps.record import Sweep
from tests.pipeline.sweeps.sample_sweeps import sweep_of

WORK = """
from offstage.pipeline.command_exit import exit_at_signals
exit_at_signals("offstage")
import sys, time
from pathlib import Path
from offstage.pipeline.record import RunRecord
record = RunRecord.load(Path(sys.argv[1]))
print("at work", flush=True)
while not Path(record.config["awaits"]).exists():
    time.sleep(0.01)
record.finish("completed")
"""
NEVER = 99
"""More jobs than there are."""


@pytest.fixture(autouse=True)
def small_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a job's process wait for the file that its config names, and complete then."""
    monkeypatch.setattr(job_process, "own_command", lambda _, *given: [sys.executable, "-c", WORK, *given])


def run(
    folder: Path, jobs_ended: Sequence[int], *, at_once: int, faults: Sequence[int] = (),
    when_one_ends: Callable[[], object] = lambda: None,
) -> tuple[dict[int, int | None], list[str]]:  # fmt: skip
    """Run jobs of which each ends once so many have, as ``jobs_ended`` says, and call ``when_one_ends`` the first time.

    Return the codes in the order in which they ended, and the statuses.
    """
    record, ended = sweep_of(len(jobs_ended)), dict[int, int | None]()
    folder.joinpath("0 ended").touch()

    def note(job: PreparedJob, code: int | None) -> None:
        ended[job.known.number] = code
        folder.joinpath(f"{len(ended)} ended").touch()
        if len(ended) == 1:
            when_one_ends()

    jobs = [
        PreparedJob(
            known=known,
            sweep=str(folder),
            folder=str(folder / known.folder),
            config={"enforce_memory": False, "awaits": str(folder / f"{jobs_ended[known.number]} ended")},
            fault="dtype: 'none' is no dtype" if known.number in faults else "",
            logging={"version": 1, "root": None},
            variables={"OF_A_JOB": "1"},
            is_current=False,
        )
        for known in record.jobs
    ]
    quiet = {"version": 1, "root": None}
    config = OmegaConf.create({"hydra": {"launcher": {"n_jobs": at_once}, "hydra_logging": quiet, "verbose": False}})
    local, sweep = LocalJobs(config), Sweep(folder, record)
    try:
        local.run(jobs, SweepProgress(sweep), note)
    finally:
        sweep.close()
        statuses = [RunRecord.load(path).run.status for path in sorted(folder.glob("*/run.json"))]
    return ended, statuses


def test_a_job_that_is_faulty_is_told_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended, statuses = run(tmp_path, [0, 0, 0], at_once=1, faults=[1])
    assert ended == {0: 0, 1: 2, 2: 0}
    assert statuses == ["completed", "failed", "completed"]
    assert capsys.readouterr().err == "offstage: dtype: 'none' is no dtype\n"
    assert tmp_path.joinpath("0/screen.log").read_text() == "at work\n"
    assert "OF_A_JOB" not in os.environ


def test_a_short_job_makes_room_for_the_next_while_a_long_one_works(tmp_path: Path) -> None:
    ended, statuses = run(tmp_path, [2, 0, 0], at_once=2)
    assert list(ended) == [1, 2, 0]
    assert statuses == ["completed"] * 3


@pytest.mark.parametrize("at_once", [1, 2])
def test_an_interrupt_ends_those_at_work_and_none_begins(at_once: int, tmp_path: Path) -> None:
    def interrupt() -> None:
        while not all((tmp_path / str(number) / "screen.log").exists() for number in range(at_once)):
            pass
        os.kill(os.getpid(), signal.SIGINT)

    Timer(0, interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, [NEVER, NEVER, NEVER], at_once=at_once)
    records = [RunRecord.load(path).run.status for path in sorted(tmp_path.glob("*/run.json"))]
    assert records == ["interrupted"] * at_once


def test_a_job_that_somebody_is_at_is_waited_for_and_keeps_nobody_from_work(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    descriptor = lock(tmp_path / "0" / ".job.lock")
    ended, statuses = run(tmp_path, [0, 0, 0], at_once=2, when_one_ends=partial(os.close, descriptor))
    assert (set(ended), next(iter(ended))) == ({0, 1, 2}, 1)
    assert statuses == ["completed"] * 3
