"""Sweeps as ``sweep.json`` has them, over seeds."""

from __future__ import annotations

from pathlib import Path

from offstage.pipeline.sweeps.record import SweepJob, SweepRecord


def sweep_of(count: int, *, foreseen: bool = True) -> SweepRecord:
    """Return a sweep of so many jobs, which differ in their seed."""
    jobs = tuple(SweepJob(number, (f"seed={number}",), str(number), f"{number}") for number in range(count))
    words = ("-m", f"seed=range({count})")
    return SweepRecord(
        words, str(Path.cwd()), "a.Sweeper", foreseen, {"dtype": "auto", "model": {"path": "/ckpt"}}, jobs
    )
