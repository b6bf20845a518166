"""The memory monitor: how much memory this process really holds, at its peak, by stage and over the run.

What is counted on the host is anonymous resident memory: what the process wrote and the system can't drop.
Mapped pages of a checkpoint are not in it, since the system takes them back when it needs them; the resident
set, which has them, is kept beside it. A thread samples, so a peak shorter than its interval can be missed;
stages begin and end with a sample. On an accelerator torch keeps the peak itself, and it is exact.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol

import psutil

from pipeline.timeline import Timeline

_STATM = Path("/proc/self/statm")
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """Peaks in bytes: of anonymous host memory, and of each accelerator by its index."""

    host_bytes: int
    device_bytes: Mapping[int, int] = field(default_factory=dict)


class _Sample(NamedTuple):
    anonymous: int
    resident: int


class _Gauge(Protocol):
    def read(self) -> _Sample: ...

    def close(self) -> None: ...


class MemoryMonitor:
    """Samples this process's memory while it is entered; its peaks stay readable afterwards.

    >>> with MemoryMonitor() as monitor:
    ...     monitor.start_stage()
    ...     peak = monitor.stage_peak()
    >>> peak.host_bytes <= monitor.peak_host_bytes
    True

    While it is entered it resets torch's peak counters at each stage.
    """

    def __init__(self, *, interval_seconds: float = 0.01) -> None:
        self._interval_seconds = interval_seconds
        self._gauge: _Gauge | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._run = _Sample(0, 0)
        self._stage_host_bytes = 0
        self._run_devices: dict[int, int] = {}
        self._timeline = Timeline()
        self._began = 0.0

    def __enter__(self) -> MemoryMonitor:
        self._began = time.perf_counter()
        self._gauge = _StatmGauge() if _STATM.exists() else _ProcessGauge()
        self._stop.clear()
        self._thread = threading.Thread(target=self._watch, name="offstage-memory", daemon=True)
        self._sample()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._settle_devices()
        self._sample()
        with self._lock:
            if self._gauge is not None:
                self._gauge.close()
                self._gauge = None

    def start_stage(self) -> None:
        """Begin a stage: its peaks count from what is held now."""
        self._settle_devices()
        _reset_device_peaks()
        with self._lock:
            self._stage_host_bytes = 0
        self._sample()

    def stage_peak(self) -> MemoryPeak:
        """Return the peaks since ``start_stage``."""
        devices = self._settle_devices()
        self._sample()
        return MemoryPeak(host_bytes=self._stage_host_bytes, device_bytes=devices)

    @property
    def peak_host_bytes(self) -> int:
        """The peak of anonymous resident memory since the monitor was entered, now included."""
        self._sample()
        return self._run.anonymous

    @property
    def series(self) -> list[tuple[float, int]]:
        """Anonymous resident memory over time: seconds since the monitor was entered, and bytes."""
        with self._lock:
            return self._timeline.points

    @property
    def peak_host_rss_bytes(self) -> int:
        """The peak of the resident set since the process began, where the system tells; it has mapped files
        too."""
        self._sample()
        return max(self._run.resident, _resident_high_water())

    @property
    def peak_device_bytes(self) -> Mapping[int, int]:
        """The peak of each accelerator over all stages; empty before torch has used one."""
        self._settle_devices()
        return dict(self._run_devices)

    def _watch(self) -> None:
        while not self._stop.wait(self._interval_seconds):
            self._sample()

    def _sample(self) -> None:
        with self._lock:
            if self._gauge is None:
                return
            now = self._gauge.read()
            self._run = _Sample(*map(max, self._run, now))
            self._timeline.add(time.perf_counter() - self._began, now.anonymous)
            self._stage_host_bytes = max(self._stage_host_bytes, now.anonymous)

    def _settle_devices(self) -> dict[int, int]:
        peaks = _device_peaks() if self._gauge is not None else {}
        for index, peak in peaks.items():
            self._run_devices[index] = max(peak, self._run_devices.get(index, 0))
        return peaks


class _StatmGauge:
    """Linux: one ``pread`` of a file that stays open. Takes microseconds, whatever the process has mapped."""

    def __init__(self) -> None:
        self._descriptor = os.open(_STATM, os.O_RDONLY)
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    def read(self) -> _Sample:
        _, resident, shared, *_ = map(int, os.pread(self._descriptor, 256, 0).split())
        return _Sample((resident - shared) * self._page_bytes, resident * self._page_bytes)

    def close(self) -> None:
        os.close(self._descriptor)


class _ProcessGauge:
    """Elsewhere: what psutil knows. Without a count of shared pages the resident set stands for both."""

    def __init__(self) -> None:
        self._process = psutil.Process()

    def read(self) -> _Sample:
        memory = self._process.memory_info()
        return _Sample(memory.rss - getattr(memory, "shared", 0), memory.rss)

    def close(self) -> None:
        """Nothing is held open."""


def _resident_high_water() -> int:
    """Return the kernel's own peak of the resident set, 0 where it keeps none."""
    try:
        match = re.search(r"^VmHWM:\s*(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0


def _device_peaks() -> dict[int, int]:
    """Return torch's peaks by accelerator. A process that never used one doesn't import torch for it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    return {index: torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count())}


def _reset_device_peaks() -> None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    for index in range(torch.cuda.device_count()):
        torch.cuda.reset_peak_memory_stats(index)
