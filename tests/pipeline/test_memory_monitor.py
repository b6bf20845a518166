from __future__ import annotations

import mmap
import resource
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from offstage.pipeline.memory_monitor import MOST_POINTS, MemoryMonitor, MemoryPeak, Timeline
from tests.deadline import deadline

MIB = 2**20
SLACK = 8 * MIB

linux = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")


def fill(mebibytes: int) -> mmap.mmap:
    """Anonymous memory that is resident, and goes back to the system at once when it is closed."""
    memory = mmap.mmap(-1, mebibytes * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for offset in range(0, len(memory), 4096):
        memory[offset] = 1
    return memory


def wait_for_a_sample(monitor: MemoryMonitor) -> None:
    """Wait until the monitor's own thread has looked once more: others may keep the machine busy for longer."""
    before = len(monitor.series)
    with deadline():
        while len(monitor.series) == before:
            time.sleep(0.01)


def test_memory_over_time_is_kept() -> None:
    with MemoryMonitor() as monitor:
        memory = bytearray(64 * 2**20)
        wait_for_a_sample(monitor)
        del memory
    series = monitor.series
    assert len(series) >= 2
    assert max(value for _, value in series) >= 64 * 2**20
    assert series[-1][0] >= 0.05


def test_a_peak_between_two_boundaries_is_seen() -> None:
    with MemoryMonitor() as monitor:
        monitor.start_stage()
        before = monitor.stage_peak().host_bytes
        memory = fill(64)
        wait_for_a_sample(monitor)
        memory.close()
        assert monitor.stage_peak().host_bytes - before == pytest.approx(64 * MIB, abs=SLACK)


def test_a_stage_without_a_pause_counts_what_it_holds_at_its_end() -> None:
    with MemoryMonitor(interval_seconds=60) as monitor:
        monitor.start_stage()
        before = monitor.stage_peak().host_bytes
        memory = fill(64)
        assert monitor.stage_peak().host_bytes - before == pytest.approx(64 * MIB, abs=SLACK)
        memory.close()


def test_a_stage_does_not_inherit_the_peak_of_the_one_before_and_the_run_keeps_it() -> None:
    with MemoryMonitor(interval_seconds=60) as monitor:
        monitor.start_stage()
        memory = fill(64)
        first = monitor.stage_peak()
        memory.close()
        monitor.start_stage()
        second = monitor.stage_peak()
    assert first.host_bytes - second.host_bytes == pytest.approx(64 * MIB, abs=SLACK)
    assert monitor.peak_host_bytes >= first.host_bytes


def test_what_is_held_when_a_stage_begins_counts_for_it() -> None:
    with MemoryMonitor(interval_seconds=60) as monitor:
        before = monitor.peak_host_bytes
        memory = fill(64)
        monitor.start_stage()
        memory.close()
        assert monitor.stage_peak().host_bytes - before == pytest.approx(64 * MIB, abs=SLACK)


def test_what_is_held_when_the_monitor_stops_counts_for_the_run() -> None:
    with MemoryMonitor(interval_seconds=60) as monitor:
        before = monitor.peak_host_bytes
        memory = fill(64)
    memory.close()
    assert monitor.peak_host_bytes - before == pytest.approx(64 * MIB, abs=SLACK)


@linux
def test_mapped_pages_of_a_file_count_in_the_resident_set_alone(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(b"x" * 64 * MIB)
    with MemoryMonitor() as monitor:
        anonymous, resident = monitor._run
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            assert sum(mapped[offset] for offset in range(0, len(mapped), 4096)) > 0
            assert monitor.peak_host_bytes - anonymous < SLACK
            assert monitor._run.resident - resident == pytest.approx(64 * MIB, abs=SLACK)
            assert monitor.peak_host_rss_bytes >= monitor._run.resident


@linux
def test_the_kernels_own_peak_is_found_even_if_no_sample_saw_it() -> None:
    fill(64).close()
    with MemoryMonitor(interval_seconds=60) as monitor:
        high_water = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024
        assert monitor.peak_host_rss_bytes >= high_water >= 64 * MIB


def test_the_peaks_stay_when_the_monitor_has_stopped() -> None:
    with MemoryMonitor() as monitor:
        peak = monitor.peak_host_bytes
    assert monitor.peak_host_bytes >= peak > 0
    memory = fill(64)
    assert monitor.peak_host_bytes - peak < SLACK
    memory.close()


@linux
@pytest.mark.parametrize("error", [None, KeyboardInterrupt()])
def test_it_leaves_no_thread_and_no_open_file(error: BaseException | None) -> None:
    threads, files = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        try:
            with MemoryMonitor():
                assert threading.active_count() == threads + 1
                if error is not None:
                    raise error
        except KeyboardInterrupt:
            pass
    assert threading.active_count() == threads
    assert len(list(Path("/proc/self/fd").iterdir())) == files


def test_a_process_that_may_open_no_file_is_watched_again_when_it_may(capfd: pytest.CaptureFixture[str]) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with MemoryMonitor(interval_seconds=0.001) as monitor:
        seen = monitor.peak_host_bytes
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
        try:
            time.sleep(0.05)
            monitor.start_stage()
            assert monitor.peak_host_bytes >= seen
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        with fill(64):
            assert monitor.peak_host_bytes > seen + 64 * MIB - SLACK
    assert "Exception in thread" not in capfd.readouterr().err


def test_it_can_be_entered_again() -> None:
    monitor = MemoryMonitor(interval_seconds=0.001)
    for _ in range(2):
        with monitor:
            before = monitor.peak_host_bytes
            assert before > 0
    with monitor:
        memory = fill(64)
        wait_for_a_sample(monitor)
        memory.close()
    assert monitor.peak_host_bytes - before == pytest.approx(64 * MIB, abs=SLACK)


def test_a_sample_takes_microseconds() -> None:
    with MemoryMonitor(interval_seconds=60) as monitor:
        began = time.thread_time()
        for _ in range(1000):
            monitor._sample()
        assert (time.thread_time() - began) / 1000 < 0.0005


class FakeCuda:
    """Two accelerators that keep their peaks as torch does."""

    def __init__(self) -> None:
        self.initialised = True
        self.allocated = {0: 0, 1: 0}
        self.peaks = {0: 0, 1: 0}

    def hold(self, index: int, count: int) -> None:
        self.allocated[index] = count
        self.peaks[index] = max(self.peaks[index], count)

    def is_initialized(self) -> bool:
        return self.initialised

    def device_count(self) -> int:
        return len(self.allocated)

    def max_memory_allocated(self, index: int) -> int:
        return self.peaks[index]

    def reset_peak_memory_stats(self, index: int) -> None:
        self.peaks[index] = self.allocated[index]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake = FakeCuda()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=fake))
    return fake


def test_device_peaks_count_by_stage(cuda: FakeCuda) -> None:
    with MemoryMonitor() as monitor:
        cuda.hold(0, 500)
        cuda.hold(0, 100)
        monitor.start_stage()
        cuda.hold(0, 10)
        cuda.hold(1, 30)
        cuda.hold(1, 5)
        assert monitor.stage_peak().device_bytes == {0: 100, 1: 30}
        monitor.start_stage()
        assert monitor.stage_peak().device_bytes == {0: 10, 1: 5}


def test_accelerators_that_no_one_used_have_no_peaks(cuda: FakeCuda) -> None:
    cuda.initialised = False
    with MemoryMonitor() as monitor:
        monitor.start_stage()
        assert monitor.stage_peak() == MemoryPeak(monitor.stage_peak().host_bytes, {})


def test_without_torch_there_are_no_device_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with MemoryMonitor() as monitor:
        monitor.start_stage()
        assert monitor.stage_peak().device_bytes == {}
    assert "torch" not in sys.modules


def test_points_are_the_peaks_of_their_spans() -> None:
    line = Timeline(span_seconds=1.0)
    for seconds, value in [(0.1, 3), (0.2, 9), (0.9, 4), (2.5, 7)]:
        line.add(seconds, value)
    assert line.points == [(0.0, 9), (2.0, 7)]


def test_a_long_run_keeps_few_points_and_every_peak() -> None:
    line = Timeline(span_seconds=0.01)
    for step in range(100_000):
        line.add(step * 0.01, 10**9 if step == 77_777 else step)
    points = line.points
    assert len(points) <= MOST_POINTS
    assert max(value for _, value in points) == 10**9
    assert [seconds for seconds, _ in points] == sorted(seconds for seconds, _ in points)
