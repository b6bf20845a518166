"""What direct reads still bring while every core is at work: counting, which moves no memory, and copying memory.

    python -m tests.benchmarks.disturbed_reads FOLDER --rounds 3

``FOLDER`` is a checkpoint with safetensors files. In turn, each round: reads alone, beside counting and beside copying;
then medians, and their shares of what reads alone bring. Unpacking and computing move memory as copying does, so this
is the limit of what streams while the host computes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from offstage.pipeline.environment import allowed_cores
from tests.benchmarks.busy import COPYING, COUNTING, busy
from tests.benchmarks.offload import say
from tests.benchmarks.storage import direct_read_bandwidth

WORK: Mapping[str, str | None] = {"alone": None, "beside counting": COUNTING, "beside copying": COPYING}
WARMING_SECONDS = 1.0


def main(given: Sequence[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args(given)
    rates: dict[str, list[float]] = defaultdict(list)
    for _ in range(arguments.rounds):
        for name, code in WORK.items():
            with busy(len(allowed_cores()), code) if code else nullcontext():
                time.sleep(WARMING_SECONDS)
                rates[name].append(direct_read_bandwidth(arguments.folder))
    medians = {name: statistics.median(bandwidths) for name, bandwidths in rates.items()}
    for name, rate in medians.items():
        least, most = min(rates[name]) / 1e9, max(rates[name]) / 1e9
        share = rate / medians["alone"]
        say(f"{name:16} {rate / 1e9:.2f} GB/s ({least:.2f} to {most:.2f}), {share:.2f} of reads alone")


if __name__ == "__main__":
    main()
