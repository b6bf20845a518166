"""A job's process, and the signals of the one that waits for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from offstage.pipeline import job_process
from offstage.pipeline.command_exit import held_back
from offstage.pipeline.errors import KilledError
from offstage.pipeline.job_process import PassedSignals, supervise
from offstage.pipeline.record import RunRecord

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
HEEDING = """
from offstage.pipeline.command_exit import exit_at_signals
exit_at_signals("job")
import time
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_came_while_the_process_was_made_ends_it_with_a_word(number: signal.Signals) -> None:
    with PassedSignals() as signals:
        os.kill(os.getpid(), number)
        with held_back():
            process = subprocess.Popen([sys.executable, "-c", HEEDING], process_group=0, stderr=subprocess.PIPE)
        signals.pass_to(process)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, b"job: interrupted\n")
    assert signals.came == [number]
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_the_first_signal_is_passed_on_as_it_is_and_the_next_one_kills() -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    with PassedSignals() as signals:
        process = subprocess.Popen([sys.executable, "-c", deaf], process_group=0, stdout=subprocess.PIPE)
        signals.pass_to(process)
        assert process.stdout is not None
        process.stdout.readline()  # it is deaf now
        os.kill(os.getpid(), signal.SIGTERM)
        assert process.poll() is None
        os.kill(os.getpid(), signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    assert len(signals.came) == 2


def test_signals_are_heeded_as_before_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with PassedSignals():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


DYING = """
import os, signal, sys
from pathlib import Path
from offstage.pipeline.record import RunRecord
record = RunRecord.load(Path(sys.argv[1]))
if "--completes" in sys.argv:
    record.finish("completed")
os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunRecord:
    """A run whose process dies of a signal, after it has completed if it has an option."""
    monkeypatch.setattr(job_process, "own_command", lambda _, *given: [sys.executable, "-c", DYING, *given])
    return RunRecord.start(tmp_path, overrides=[], config={}, environment={})


def test_a_run_that_completed_stays_so_when_its_process_dies_as_it_ends(
    started: RunRecord, caplog: pytest.LogCaptureFixture
) -> None:
    assert supervise(started, options=["--completes"]) == 0
    kept = RunRecord.load(started.path).data
    assert (kept["status"], kept["error"]) == ("completed", None)
    assert "the run completed, and its process was killed by SIGSEGV" in caplog.text


def test_a_run_whose_process_dies_before_its_end_failed(started: RunRecord) -> None:
    with pytest.raises(KilledError, match="killed by SIGSEGV"):
        supervise(started)
    assert RunRecord.load(started.path).data["status"] == "failed"
