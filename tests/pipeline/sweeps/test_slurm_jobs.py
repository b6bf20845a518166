"""What squeue says is believed where it answers; where it doesn't, no job is lost for it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from offstage.pipeline.errors import ConfigError
from offstage.pipeline.sweeps.slurm_jobs import SlurmJobs, SlurmQueue
from offstage.pipeline.sweeps.sweep_keys import SlurmKeys

ANSWERS = {
    "an answer": "echo 7; echo 8_1",
    "no such answer": "echo slurm_load_jobs error: Unable to contact slurm controller >&2; exit 1",
    "an empty queue": "true",
}


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where the program lies that is found as squeue; it isn't there yet."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    return tmp_path / "squeue"


def answer(squeue: Path, kind: str) -> None:
    squeue.write_text(f'#!/bin/sh\necho "$@" >> {squeue}.asked\n{ANSWERS[kind]}\n')
    squeue.chmod(0o755)


def test_all_jobs_are_asked_for_at_once(squeue: Path) -> None:
    answer(squeue, "an answer")
    queue = SlurmQueue()
    queue.ask()
    assert [queue.knows(job) for job in ("7", "8_1", "8_0", "9")] == [True, True, False, False]
    assert Path(f"{squeue}.asked").read_text() == f"-h -r -u {os.getuid()} -o %i\n"


def test_a_job_is_lost_once_a_queue_that_answers_has_not_known_it_for_a_while(squeue: Path) -> None:
    answer(squeue, "an answer")
    queue = SlurmQueue(absent_seconds=0.05)
    queue.ask()
    assert not queue.has_lost("7")
    assert not queue.has_lost("9"), "its exit code may be on its way"
    time.sleep(0.06)
    assert queue.has_lost("9")
    assert not queue.has_lost("7")


@pytest.mark.parametrize("kind", ["no such answer", None])
def test_a_controller_that_is_out_of_reach_loses_no_job(kind: str | None, squeue: Path) -> None:
    queue = SlurmQueue(absent_seconds=0.05)
    answer(squeue, "an empty queue")
    queue.ask()
    assert not queue.has_lost("7")
    if kind is None:
        squeue.unlink()
    else:
        answer(squeue, kind)
    queue.ask()
    time.sleep(0.06)
    assert not queue.has_lost("7")
    answer(squeue, "an empty queue")
    queue.ask()
    assert not queue.has_lost("7"), "the while begins anew"


def test_without_submitit_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ConfigError, match=r"pip install 'offstage-pipeline\[slurm\]'"):
        SlurmJobs(OmegaConf.structured(SlurmKeys))


def test_where_slurm_s_commands_are_not_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="there is no sbatch here"):
        SlurmJobs(OmegaConf.structured(SlurmKeys))
