"""Who used the time and the memory.

A later stage asks for the live half of an earlier one in the middle of its own work; what that costs belongs to the
stage that is made, not to the one that asked. The meter keeps a stack of the stages at work and charges the top one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from offstage.pipeline.memory_monitor import MemoryMonitor


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
