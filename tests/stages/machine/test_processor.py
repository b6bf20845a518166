"""Who had the processor, from the files in which Linux accounts for it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from offstage.pipeline.environment import allowed_cores
from offstage.stages.machine.processor import CONTENDED_SHARE, ProcessorMeter, ProcessorUse

CORE = min(allowed_cores())


def write(root: Path, *, waits: dict[int, tuple[int, int]] | None, worked: int, stolen: int = 0) -> Path:
    """Write how long threads ran and waited (nanoseconds), and how long a core worked (ticks)."""
    root.joinpath("proc").mkdir(parents=True, exist_ok=True)
    for thread, (ran, waited) in (waits or {}).items():
        folder = root / f"proc/self/task/{thread}"
        folder.mkdir(parents=True, exist_ok=True)
        folder.joinpath("schedstat").write_text(f"{ran} {waited} 3\n")
    root.joinpath("proc/stat").write_text(
        f"cpu  9 9 9 9\ncpu{CORE} {worked} 0 0 50 0 0 0 {stolen} 0 0\ncpu999 5 5 5 5\n"
    )
    return root


@pytest.mark.parametrize(
    ("cpu", "waited", "others", "stolen", "share"),
    [
        (1.0, 0.0, 0.0, 0.0, 0.0),
        (1.0, 1.0, 5.0, 0.0, 0.5),
        (1.0, 1.0, 0.0, 0.0, 0.0),
        (1.0, 9.0, 1.0, 0.0, 0.5),
        (1.0, 0.0, 5.0, 0.0, 0.0),
        (1.0, 0.0, 0.0, 1.0, 0.5),
        (1.0, 0.0, 1.0, 0.5, 0.2),
    ],
)
def test_what_others_took_is_what_was_waited_for_and_never_more_than_they_worked(
    cpu: float, waited: float, others: float, stolen: float, share: float
) -> None:
    use = ProcessorUse(1.0, cpu, waited, others, stolen)
    assert use.taken_share == pytest.approx(share)
    assert use.is_contended is (share >= CONTENDED_SHARE)


@pytest.mark.parametrize(
    ("wall", "others", "stolen", "shared"),
    [(2.0, 0.0, 0.0, False), (2.0, 0.3, 0.0, True), (2.0, 0.1, 0.15, True), (0.001, 0.0001, 0.0, False)],
)
def test_a_machine_is_shared_where_others_compute_a_tenth_of_what_it_could(
    wall: float, others: float, stolen: float, shared: bool
) -> None:
    cores = len(allowed_cores())
    assert ProcessorUse(wall, 0.0, None, others * cores, stolen * cores).is_shared is shared
    assert ProcessorUse(wall, 0.0).is_shared is None


def test_what_a_process_started_that_ended_is_none_of_the_others(tmp_path: Path) -> None:
    meter = ProcessorMeter(write(tmp_path, waits=None, worked=100))
    subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)
    used = os.times()
    write(tmp_path, waits=None, worked=700)
    ended = 6.0 - meter.use().others_seconds
    assert 0.02 < ended <= used.children_user + used.children_system + time.process_time()


def test_threads_are_summed_and_those_that_began_meanwhile_count_from_their_beginning(tmp_path: Path) -> None:
    meter = ProcessorMeter(write(tmp_path, waits={1: (10**9, 10**9), 2: (5, 0)}, worked=100))
    write(tmp_path, waits={1: (2 * 10**9, 3 * 10**9), 3: (7, 10**9)}, worked=900, stolen=10)
    use = meter.use()
    assert use.waited_seconds == pytest.approx(3.0)
    assert use.others_seconds == pytest.approx(8.0, abs=0.2)
    assert use.stolen_seconds == pytest.approx(0.1)


def test_a_system_that_tells_nothing_leaves_it_open(tmp_path: Path) -> None:
    use = ProcessorMeter(tmp_path).use()
    assert (use.waited_seconds, use.taken_share, use.is_contended, use.as_record()["contended"]) == (
        None,
        None,
        None,
        None,
    )


def test_a_process_on_the_same_core_makes_this_one_busy() -> None:
    """The real files: another process computes on the one core that this test may use."""
    before = allowed_cores()
    if not hasattr(os, "sched_setaffinity") or not Path("/proc/self/schedstat").exists():
        pytest.skip("needs Linux's account of the scheduler")
    os.sched_setaffinity(0, {CORE})
    other = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        other.stdout.readline()
        meter, until = ProcessorMeter(), time.perf_counter() + 0.4
        while time.perf_counter() < until:
            pass
        use = meter.use()
    finally:
        other.kill()
        other.communicate()
        os.sched_setaffinity(0, before)
    assert use.is_contended, use
    assert use.cpu_seconds < 0.9 * use.wall_seconds
