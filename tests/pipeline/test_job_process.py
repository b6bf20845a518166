"""A job's process, and the signals of the one that waits for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from offstage.pipeline.job_process import PassedSignals

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_a_signal_that_came_while_the_process_was_made_ends_it() -> None:
    with PassedSignals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        process = subprocess.Popen(SLEEP, process_group=0)
        signals.pass_to(process)
        assert process.wait(30) == -signal.SIGKILL
    assert signals.came == [signal.SIGINT]


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
