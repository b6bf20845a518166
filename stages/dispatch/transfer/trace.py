"""What happened when, for chrome://tracing and Perfetto: reads, copies, stalls and computing on one time line."""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offstage.pipeline.atomic_files import write_text
from offstage.stages.units import DeviceId

FILE_NAME = "trace.json"
STALL_SECONDS = 1e-4
"""Shorter waits are no stalls in a trace: taking a result takes that long."""


class Trace:
    """Collects spans from any thread; ``save`` writes them in the Trace Event Format (JSON, microseconds)."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._events: list[dict[str, Any]] = []
        self._details: dict[str, Any] = {}

    def of(self, device: DeviceId) -> Trace:
        """Return one for the spans of ``device``, on the same time line: each tells whose it is."""
        trace = copy.copy(self)
        trace._details = {"device": str(device)}
        return trace

    @contextmanager
    def span(self, name: str, category: str, **details: Any) -> Iterator[None]:
        """Record what happens inside this context as ``name``, of the ``category`` read, copy, stall or compute."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, category, began, **details)

    def add(self, name: str, category: str, began: float, **details: Any) -> None:
        """Record a span that began at ``began`` (seconds of ``time.perf_counter``) and ends now."""
        self._events.append(
            {
                "name": name,
                "cat": category,
                "ph": "X",
                "ts": (began - self._began) * 1e6,
                "dur": (time.perf_counter() - began) * 1e6,
                "pid": 0,
                "tid": threading.get_ident() % 2**31,
                "args": {**self._details, **details},
            }
        )

    def save(self, path: Path) -> None:
        """Write the spans to ``path``."""
        write_text(path, json.dumps({"traceEvents": self._events, "displayTimeUnit": "ms"}) + "\n")
