"""What direct reads still bring while every core is at work: counting, which moves no memory, and copying memory.

    python -m tests.benchmarks.disturbed_reads FOLDER --rounds 3

``FOLDER`` is a checkpoint with safetensors files. In turn, each round: reads alone, beside counting and beside copying;
then medians, and their shares of what reads alone bring. Unpacking and computing move memory as copying does, so this
is the limit of what streams while the host computes.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from pipeline.environment import allowed_cores
from tests.benchmarks.offload import say
from tests.benchmarks.storage import direct_read_bandwidth

WORK: Mapping[str, str] = {
    "alone": "",
    "beside counting": "while True: pass",
    "beside copying": "import numpy as np\na = np.ones(2**28, np.uint8)\nb = a.copy()\nwhile True: np.copyto(b, a)",
}
WARMING_SECONDS = 1.0


@contextmanager
def at_work(code: str) -> Iterator[None]:
    """Have every core run ``code``, each in a process of its own, until the end."""
    workers = [subprocess.Popen([sys.executable, "-c", code]) for _ in allowed_cores() if code]
    try:
        time.sleep(WARMING_SECONDS if workers else 0)
        yield
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def main(given: Sequence[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args(given)
    rates: dict[str, list[float]] = defaultdict(list)
    for _ in range(arguments.rounds):
        for name, code in WORK.items():
            with at_work(code):
                rates[name].append(direct_read_bandwidth(arguments.folder))
    medians = {name: statistics.median(found) for name, found in rates.items()}
    for name, rate in medians.items():
        least, most = min(rates[name]) / 1e9, max(rates[name]) / 1e9
        share = rate / medians["alone"]
        say(f"{name:16} {rate / 1e9:.2f} GB/s ({least:.2f} to {most:.2f}), {share:.2f} of reads alone")


if __name__ == "__main__":
    main()
