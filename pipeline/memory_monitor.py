"""The memory monitor: how much memory this process really holds, at its peak, by stage and over the run.

What is counted on the host is anonymous resident memory: what the process wrote and the system can't drop.
Mapped pages of a checkpoint are not in it, since the system takes them back when it needs them; the resident
set, which has them, is kept beside it. A thread samples, so a peak shorter than its interval can be missed;
stages begin and end with a sample. On an accelerator torch keeps the peak itself, and it is exact.

A later stage asks for the live half of an earlier one in the middle of its own work; what that costs belongs to the
stage that is made, not to the one that asked. A meter keeps a stack of the stages at work and charges the top one.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

_STATUS = Path("/proc/self/status")
MOST_POINTS = 240


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """Peaks in bytes: of anonymous host memory, and of each accelerator by its index."""

    host_bytes: int
    device_bytes: Mapping[int, int] = field(default_factory=dict)


class _Sample(NamedTuple):
    anonymous: int
    resident: int


class Timeline:
    """A value over time in at most ``MOST_POINTS`` points, each the peak of its span: no peak is lost.

    Spans double in length when there are more points.
    """

    def __init__(self, span_seconds: float = 0.05) -> None:
        self._span_seconds = span_seconds
        self._points: list[tuple[int, int]] = []  # number of the span, peak in it

    def add(self, seconds: float, value: int) -> None:
        """Note ``value`` at ``seconds`` since the beginning; times never go back."""
        span = int(seconds / self._span_seconds)
        if self._points and self._points[-1][0] == span:
            self._points[-1] = (span, max(value, self._points[-1][1]))
            return
        self._points.append((span, value))
        if len(self._points) > MOST_POINTS:
            self._coarsen()

    @property
    def points(self) -> list[tuple[float, int]]:
        """The beginning of each span in seconds, and the peak in it."""
        return [(round(span * self._span_seconds, 3), value) for span, value in self._points]

    def _coarsen(self) -> None:
        merged: dict[int, int] = {}
        for span, value in self._points:
            merged[span // 2] = max(value, merged.get(span // 2, 0))
        self._points, self._span_seconds = list(merged.items()), self._span_seconds * 2


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
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._run = _Sample(0, 0)
        self._stage_host_bytes = 0
        self._timeline = Timeline()
        self._began = 0.0
        self._process = psutil.Process()

    def __enter__(self) -> MemoryMonitor:
        self._began = time.perf_counter()
        self._stop.clear()
        self._thread = threading.Thread(target=self._watch, name="offstage-memory", daemon=True)
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._sample()
        self._thread = None

    def start_stage(self) -> None:
        """Begin a stage: its peaks count from what is held now."""
        cuda = _cuda()
        if cuda is not None:
            for index in range(cuda.device_count()):
                cuda.reset_peak_memory_stats(index)
        with self._lock:
            self._stage_host_bytes = 0
        self._sample()

    def stage_peak(self) -> MemoryPeak:
        """Return the peaks since ``start_stage``."""
        self._sample()
        cuda = _cuda()
        devices = {} if cuda is None else {i: cuda.max_memory_allocated(i) for i in range(cuda.device_count())}
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
        """The peak of the resident set since the process began, where the system tells; it has mapped files too."""
        self._sample()
        return max(self._run.resident, _resident_high_water())

    def _watch(self) -> None:
        while not self._stop.wait(self._interval_seconds):
            self._sample()

    def _sample(self) -> None:
        with self._lock:
            if self._thread is None:
                return
            now = _held(self._process)
            if now is None:
                return
            self._run = _Sample(*map(max, self._run, now))
            self._timeline.add(time.perf_counter() - self._began, now.anonymous)
            self._stage_host_bytes = max(self._stage_host_bytes, now.anonymous)


def _held(process: psutil.Process) -> _Sample | None:
    """Return what ``process`` holds. Where the system doesn't count shared pages the resident set stands for both.

    Null where it doesn't tell now, to a process that may open no more files, say: the next sample may.
    """
    try:
        memory = process.memory_info()
    except (OSError, psutil.Error):
        return None
    return _Sample(memory.rss - getattr(memory, "shared", 0), memory.rss)


def held_bytes() -> int | None:
    """Return the anonymous resident memory that this process holds now; null where the system doesn't tell."""
    memory = _held(psutil.Process())
    return None if memory is None else memory.anonymous


def _resident_high_water() -> int:
    """Return the kernel's own peak of the resident set, 0 where it keeps none."""
    try:
        match = re.search(r"^VmHWM:\s*(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0


def _cuda() -> Any:
    """Return ``torch.cuda`` once an accelerator is in use: torch isn't imported for it."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


@dataclass(slots=True)
class Usage:
    """What one stage has used so far: seconds, and peaks in bytes (host: anonymous memory; device by index)."""

    seconds: float = 0.0
    peak_host_bytes: int = 0
    peak_device_bytes: dict[int, int] = field(default_factory=dict)


class Meter:
    """Charges wall-clock seconds and memory peaks to stages, through a running ``MemoryMonitor``."""

    def __init__(self, monitor: MemoryMonitor) -> None:
        self._monitor = monitor
        self._usages: dict[str, Usage] = {}
        self._stack: list[str] = []
        self._since = time.perf_counter()

    def usage(self, stage: str) -> Usage:
        """Return what ``stage`` has used so far."""
        return self._usages.setdefault(stage, Usage())

    @contextmanager
    def charge(self, stage: str) -> Iterator[None]:
        """Charge what happens inside this context to ``stage``, and not to the stage that was at work before."""
        self._settle()
        self._stack.append(stage)
        try:
            yield
        finally:
            self._settle()
            self._stack.pop()

    def _settle(self) -> None:
        """Charge what happened since the last change to the stage that was at work, and start anew."""
        now, peak = time.perf_counter(), self._monitor.stage_peak()
        if self._stack:
            usage = self.usage(self._stack[-1])
            usage.seconds += now - self._since
            usage.peak_host_bytes = max(usage.peak_host_bytes, peak.host_bytes)
            for device, count in peak.device_bytes.items():
                usage.peak_device_bytes[device] = max(usage.peak_device_bytes.get(device, 0), count)
        self._since = now
        self._monitor.start_stage()
