"""How far a sweep is: a line as a job begins and ends, and on a terminal one that lives while it works."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Collection
from datetime import datetime

from offstage.pipeline.run_schema import Run
from offstage.pipeline.sweeps.record import Sweep, own_overrides
from offstage.pipeline.sweeps.results import begun, describe_counts, settled
from offstage.pipeline.terminal import shorten, show_line

_REFRESH_SECONDS = 1.0


class SweepProgress:
    """Tells of the jobs of ``sweep``: which is at work, how many have ended, how long the others will take.

    That is reckoned by how often a job has ended since the first began here, which counts whatever lies between two
    jobs and how many work at a time.
    """

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        states = [begun(sweep.folder, job) for job in sweep.jobs]
        self._completed = sum(state.status == "completed" for state in states)
        self._ended, self._began, self._last_end, self._shown = 0, 0.0, 0.0, 0.0
        self._at_work: dict[int, float] = {}
        if sweep.resumed:
            _say(f"resumed: {describe_counts(Counter(state.status for state in states))}, {shorten(sweep.folder)}")

    def begin(self, numbers: Collection[int]) -> None:
        """Say that these jobs were begun, or queued."""
        now = time.monotonic()
        self._began = self._began or now
        self._at_work |= dict.fromkeys(numbers, now)
        if not sys.stderr.isatty():
            _say(f"{self._working()}{self._left(now)}")
        self.refresh()

    def end(self, number: int) -> None:
        """Say what became of a job that has just ended."""
        self._at_work.pop(number, None)
        self._ended += 1
        self._last_end = time.monotonic()
        job = next(job for job in self._sweep.jobs if job.number == number)
        state = settled(self._sweep.folder, job)
        seconds, why = seconds_of(state.run) if state.run is not None else None, state.reason
        clock = f" in {duration(seconds)}" if seconds is not None else ""
        line = f"job {number}  {self._own(number)}  {state.status}{clock}{f': {why}' if why else ''}"
        _say(f"{line}; {self._count(self._completed + self._ended)} ended{self._left(self._last_end)}")

    def refresh(self) -> None:
        """Bring the line on a terminal up to date, once a second at most."""
        now = time.monotonic()
        if self._at_work and now - self._shown >= _REFRESH_SECONDS:
            self._shown = now
            since = duration(now - min(self._at_work.values()))
            show_line(f"{self._working()}, for {since}{self._left(now)}")

    def _working(self) -> str:
        first, count = min(self._at_work), self._completed + self._ended
        if len(self._at_work) > 1:
            return f"{len(self._at_work)} jobs at work or queued, {self._count(count)} ended"
        return f"job {first}  {self._own(first)}  is {self._count(count + 1)}"

    def _own(self, number: int) -> str:
        return own_overrides(self._sweep.jobs)[number]

    def _count(self, number: int) -> str:
        return f"{number} of {len(self._sweep.jobs)}" if self._sweep.record.foreseen else str(number)

    def _left(self, now: float) -> str:
        remaining = len(self._sweep.jobs) - self._completed - self._ended
        if remaining <= 0 or not self._ended or not self._sweep.record.foreseen:
            return ""
        each = (self._last_end - self._began) / self._ended
        return f"; about {duration(max(remaining * each - (now - self._last_end), 0))} left"


def seconds_of(run: Run) -> float | None:
    """Return how long the run took by its record's clock, null where it has no end or no beginning."""
    try:
        began, ended = (datetime.fromisoformat(str(moment)) for moment in (run.started, run.finished))
        return (ended - began).total_seconds()
    except (ValueError, TypeError):
        return None


def duration(seconds: float) -> str:
    """Return ``seconds`` in two units that fit: ``3.2 s``, ``45 s``, ``2 min 5 s``, ``3 h 20 min``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _say(line: str) -> None:
    show_line("")
    sys.stdout.write(line.splitlines()[0] + "\n")
    sys.stdout.flush()
