"""Threads that read: what is waited for goes first."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from offstage.stages.dispatch.transfer.reading_threads import ReadingThreads, Urgency
from tests.deadline import deadline
from tests.e2e.fp8_checkpoints import CONFIGS, save_fp8


class BusyThread:
    """One thread that has something to do until ``go``, and what it does after that, in order."""

    def __init__(self) -> None:
        self.threads, self.done = ReadingThreads(1), list[str]()
        self._released = threading.Event()
        self.threads.submit(self._released.wait)

    def release(self) -> None:
        self._released.set()

    def go(self) -> list[str]:
        self.release()
        self.threads.submit(int).result()
        return self.done


@pytest.fixture
def busy() -> Iterator[BusyThread]:
    thread = BusyThread()
    yield thread
    thread.go()


def test_what_is_waited_for_goes_first_in_its_order(busy: BusyThread) -> None:
    busy.threads.submit(busy.done.append, "certain")
    busy.threads.submit(busy.done.append, "awaited", urgency=Urgency.AWAITED)
    busy.threads.submit(busy.done.append, "awaited too", urgency=Urgency.AWAITED)
    assert busy.go() == ["awaited", "awaited too", "certain"]


def test_a_job_that_is_cancelled_is_not_done(busy: BusyThread) -> None:
    assert busy.threads.submit(busy.done.append, "cancelled").cancel()
    busy.threads.submit(busy.done.append, "not cancelled")
    assert busy.go() == ["not cancelled"]


def test_whoever_waits_gets_what_a_job_gives_or_raises(busy: BusyThread) -> None:
    given, failed = busy.threads.submit(int, "7"), busy.threads.submit(int, "seven")
    busy.go()
    assert given.result() == 7
    with pytest.raises(ValueError, match="seven"):
        failed.result()


class Given:
    """Something that a job is given, and reads or can't."""

    def read(self, *, fails: bool) -> None:
        if fails:
            raise OSError("can't be read")


@pytest.mark.parametrize("fails", [False, True])
def test_whoever_hears_of_a_job_finds_nothing_held_for_it(fails: bool) -> None:
    threads, alive = ReadingThreads(2), []
    gc.disable()
    try:
        for _ in range(100):
            given = Given()
            job, seen = threads.submit(lambda each: each.pop().read(fails=fails), [given]), weakref.ref(given)
            del given
            assert isinstance(job.exception(), OSError) is fails
            del job
            alive.append(seen() is not None)
    finally:
        gc.enable()
    assert not any(alive)


def test_nothing_is_held_of_a_job_that_was_cancelled(busy: BusyThread) -> None:
    given = Given()
    seen = weakref.ref(given)
    assert busy.threads.submit(partial(given.read, fails=False)).cancel()
    del given
    busy.release()
    with deadline(30):
        while seen() is not None:
            time.sleep(0.001)


INTERRUPTED = """
import threading
from offstage.stages.dispatch.transfer.reading_threads import reader_pool

def interrupted(thread):
    start(thread)
    threading.Thread.start = start
    raise KeyboardInterrupt

start, threading.Thread.start = threading.Thread.start, interrupted
try:
    reader_pool().submit(int)
except KeyboardInterrupt:
    assert reader_pool().submit(int, "7").result() == 7
"""


def test_an_interrupt_as_a_thread_starts_keeps_no_process_from_ending() -> None:
    """An executor's thread that was started so is unknown to what ends them all, and waited for."""
    subprocess.run([sys.executable, "-c", INTERRUPTED], check=True, timeout=120)


def test_what_is_at_work_as_the_threads_are_ended_is_done() -> None:
    threads, at_work, go, done = ReadingThreads(1), threading.Event(), threading.Event(), list[int]()
    threads.submit(lambda: (at_work.set(), go.wait(), done.append(1)))
    late = threads.submit(done.append, 2)
    at_work.wait()
    threading.Timer(0.05, go.set).start()
    threads.close()
    assert done == [1]
    assert not late.done()
    with pytest.raises(RuntimeError, match="the process ends"):
        threads.submit(int)


TEAMS = """
import os, sys, threading, offstage, torch
from tests.python_api.rates import RATES

for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
    os.environ.pop(name, None)
torch.set_num_threads(2)
places = {"device_map": {"": "disk"}, "storage": {"io": "direct"}, "hardware": {"rates": RATES}, "dtype": "bfloat16"}
for products in ("fused", "exact"):
    loaded = offstage.load(sys.argv[1], quantized={"products": products}, **places)
    loaded.model(torch.ones(1, 2, dtype=torch.long))
    assert loaded.traffic.streamed_bytes
    print(any(thread.name == "offstage-idle" for thread in threading.enumerate()))
"""


def test_idle_teams_of_operators_sleep_only_once_something_is_unpacked_while_these_compute(tmp_path: Path) -> None:
    path = save_fp8(tmp_path / "model", CONFIGS["llama"], block=(32, 32))
    command = [sys.executable, "-c", TEAMS, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["False", "True"]
