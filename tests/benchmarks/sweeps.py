"""Sweeps of the small model that comes with offstage: seconds a job.

    python -m tests.benchmarks.sweeps
    python -m tests.benchmarks.sweeps --rounds 5

``run``: eight jobs that generate with a seed of their own each, one at a time. ``plan``: twenty-four plans for as many
budgets, one at a time and two side by side. Seconds are those of the whole command, imports included, over its jobs;
each has an empty folder for its outputs, and what is known of the machine is known before. Sides take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.e2e.conftest import COMMAND

BUDGETS = [f"{size}MB" for size in range(4, 28)]
_PLANS = ["stages=plan_only", f"max_memory.cpu={','.join(BUDGETS)}"]
SIDES: Mapping[str, tuple[int, Sequence[str]]] = {
    "run, one at a time": (8, ["seed=range(1,9)"]),
    "plan, one at a time": (len(BUDGETS), [*_PLANS, "hydra.launcher.n_jobs=1"]),
    "plan, two at a time": (len(BUDGETS), [*_PLANS, "hydra.launcher.n_jobs=2"]),
}


def seconds_a_job(count: int, asked: Sequence[str], user: Path) -> float:
    """Return the seconds of a sweep of so many jobs over their ``count``; ``user`` has what is known of the machine."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        done = subprocess.run(
            [*COMMAND, "-m", *asked], cwd=folder, env={**os.environ, "XDG_CACHE_HOME": str(user)}, check=False,
            capture_output=True, text=True,
        )  # fmt: skip
        taken = time.perf_counter() - began
        jobs = list(Path(folder).glob("outputs/**/run.json"))
    if done.returncode or len(jobs) != count:
        raise SystemExit(f"{len(jobs)} of {count} jobs:\n{done.stderr}")
    return taken / count


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    seconds_of: dict[str, list[float]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as user:
        seconds_a_job(1, ["seed=1"], Path(user))
        for _ in range(given.rounds):
            for side, (count, asked) in SIDES.items():
                seconds_of[side].append(seconds_a_job(count, asked, Path(user)))
    sys.stdout.write(f"{'seconds a job':22}{'median':>8}{'least':>8}{'most':>8}\n")
    for side, taken in seconds_of.items():
        sys.stdout.write(f"{side:22}{statistics.median(taken):8.2f}{min(taken):8.2f}{max(taken):8.2f}\n")


if __name__ == "__main__":
    main()
