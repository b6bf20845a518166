"""What is built from a stranger's file ends within its bounds, and leaves the process as it was."""

from __future__ import annotations

import resource
import signal
import threading
from contextlib import suppress

import pytest
import torch

from offstage.pipeline.errors import CheckpointError, ConfigError
from offstage.stages.checkpoints import bounds
from offstage.stages.checkpoints.bounds import bounded, bounded_in_time
from tests.deadline import deadline


def is_enforced() -> bool:
    """Return whether this system holds a process to ``RLIMIT_DATA``."""
    try:
        with bounded("f"):
            bytearray(bounds.BYTES * 2 + 2**34)
    except CheckpointError:
        return True
    return False


def test_what_takes_too_long_is_ended_even_where_errors_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "SECONDS", 1)

    def build() -> None:
        while True:
            with suppress(Exception):
                sum(range(1000))

    words = "the config: building it takes more than 1 s"
    with deadline(), pytest.raises(CheckpointError, match=words), bounded("the config"):
        build()
    assert signal.getitimer(signal.ITIMER_PROF) == (0, 0)
    assert signal.getsignal(signal.SIGPROF) == signal.SIG_DFL


def work_without_end() -> None:
    while True:
        sum(range(1000))


def test_of_two_bounds_the_one_that_ends_first_is_told_and_the_other_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "SECONDS", 1)

    @bounded_in_time("it", 0.25, as_none_does="as none does", kind=ConfigError)
    def work_for_a_quarter() -> None:
        work_without_end()

    @bounded("the config")
    def build() -> None:
        with pytest.raises(ConfigError, match=r"^it takes more than 0\.25 s of processor time, as none does$"):
            work_for_a_quarter()
        with bounded_in_time("it", 100, as_none_does="as none does"):
            work_without_end()

    with deadline(), pytest.raises(CheckpointError, match="the config: building it takes more than 1 s"):
        build()
    assert signal.getitimer(signal.ITIMER_PROF) == (0, 0)


def test_what_takes_too_much_memory_is_ended() -> None:
    if not is_enforced():
        pytest.skip("this system has no limit of a process's data")
    before = resource.getrlimit(resource.RLIMIT_DATA)
    for build in (lambda: bytearray(2**40), lambda: torch.arange(10**12)):
        with pytest.raises(CheckpointError, match="takes more than 2147483648 bytes"), bounded("config.json"):
            build()
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_other_errors_pass_and_a_thread_may_build_too() -> None:
    with pytest.raises(RuntimeError, match="its own"), bounded("f"):
        raise RuntimeError("its own")
    done: list[int] = []

    def build() -> None:
        with bounded("f"):
            done.append(1)

    thread = threading.Thread(target=build)
    thread.start()
    thread.join()
    assert done == [1]
