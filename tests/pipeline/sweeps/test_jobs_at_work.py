"""Jobs on this machine, so many at a time: what each came to is told, and an interrupt ends all that are at work."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Timer

import pytest
from omegaconf import OmegaConf

from offstage.pipeline import job_process
from offstage.pipeline.cache.locks import lock
from offstage.pipeline.record import RunRecord
from offstage.pipeline.sweeps.job_run import PreparedJob
from offstage.pipeline.sweeps.jobs import ComposedJob
from offstage.pipeline.sweeps.local_jobs import LocalJobs
from offstage.pipeline.sweeps.progress import SweepProgress
from offstage.pipeline.sweeps.record import Sweep
from tests.pipeline.sweeps.sample_sweeps import sweep_of

WORK = """
import sys, time
from pathlib import Path
from offstage.pipeline.record import RunRecord
record = RunRecord.load(Path(sys.argv[1]))
print("at work", flush=True)
try:
    time.sleep(record.config["seconds"])
except KeyboardInterrupt as error:
    record.finish("interrupted", error=error)
    sys.exit(130)
record.finish("completed")
"""


@pytest.fixture(autouse=True)
def small_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a job's process sleep for as long as its config says, and complete then."""
    monkeypatch.setattr(job_process, "own_command", lambda _, *given: [sys.executable, "-c", WORK, *given])


def run(
    folder: Path, seconds: Sequence[float], *, at_once: int, faults: Sequence[int] = ()
) -> tuple[dict[int, int | None], list[str]]:
    """Run jobs that take so many ``seconds``; return the codes in the order in which they ended, and the statuses."""
    record, ended = sweep_of(len(seconds)), dict[int, int | None]()
    jobs = [
        ComposedJob(
            known,
            PreparedJob(
                number=known.number,
                overrides=known.overrides,
                sweep=str(folder),
                folder=str(folder / known.folder),
                config={"enforce_memory": False, "seconds": seconds[known.number]},
                fault="dtype: 'none' is no dtype" if known.number in faults else "",
                logging={"version": 1, "root": None},
                variables={"OF_A_JOB": "1"},
                is_current=False,
            ),
            {},
        )
        for known in record.jobs
    ]
    quiet = {"version": 1, "root": None}
    config = OmegaConf.create({"hydra": {"launcher": {"n_jobs": at_once}, "hydra_logging": quiet, "verbose": False}})
    local, sweep = LocalJobs(config), Sweep(folder, record)
    try:
        local.run(jobs, SweepProgress(sweep), lambda job, code: ended.update({job.known.number: code}))
    finally:
        sweep.close()
        statuses = [RunRecord.load(path).run.status for path in sorted(folder.glob("*/run.json"))]
    return ended, statuses


def test_a_job_that_is_faulty_is_told_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended, statuses = run(tmp_path, [0.0, 0.0, 0.0], at_once=1, faults=[1])
    assert ended == {0: 0, 1: 2, 2: 0}
    assert statuses == ["completed", "failed", "completed"]
    assert capsys.readouterr().err == "offstage: dtype: 'none' is no dtype\n"
    assert tmp_path.joinpath("0/screen.log").read_text() == "at work\n"
    assert "OF_A_JOB" not in os.environ


def test_a_short_job_makes_room_for_the_next_while_a_long_one_works(tmp_path: Path) -> None:
    ended, statuses = run(tmp_path, [6.0, 0.0, 0.0], at_once=2)
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
        run(tmp_path, [60.0, 60.0, 60.0], at_once=at_once)
    records = [RunRecord.load(path).run.status for path in sorted(tmp_path.glob("*/run.json"))]
    assert records == ["interrupted"] * at_once


def test_a_job_that_somebody_is_at_is_waited_for_and_keeps_nobody_from_work(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    held = lock(tmp_path / "0" / ".job.lock")
    Timer(3.0, os.close, [held]).start()
    ended, statuses = run(tmp_path, [0.0, 0.0, 0.0], at_once=2)
    assert (set(ended), next(iter(ended))) == ({0, 1, 2}, 1)
    assert statuses == ["completed"] * 3
