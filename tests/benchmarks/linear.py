"""Seconds a token against streamed bytes a token, from 0.1B to 7B: a line, if storage is what bounds them.

    python -m tests.benchmarks.linear --rounds 3 --plot .github/pictures/linear.png

Of each size all that can be streamed is: everything on disk (a looked-up embedding is gathered by the row), staging of
twice the reserve, direct reads, no cap. A size's checkpoint is made on the spot and removed after its runs, unless it
was there already or ``--keep`` says so: the largest takes 13.5 GB. As many tokens are decoded as stream about 6 GB, at
least 2 and at most 24 beside the first. The table has medians, with the raw direct-read bandwidth of the same files
measured before; then comes the least-squares line through them, with its R².
"""

from __future__ import annotations

import argparse
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from offstage.stages.units import format_bytes
from tests.benchmarks.caps import drop_page_cache
from tests.benchmarks.checkpoints import SHAPES, make
from tests.benchmarks.offload import say
from tests.benchmarks.sides import offstage_plan, offstage_record
from tests.benchmarks.storage import direct_read_bandwidth

STREAM_BYTES = 6 * 10**9
STEPS = (2, 24)
STREAMED = "streamed_bytes_per_token"
SECONDS, STALLED = "decode_seconds_per_token", "stall_seconds_per_token"
OPTIONS = ("device_map=disk", "storage.io=direct")


@dataclass(frozen=True, slots=True)
class Point:
    """One size's medians: streamed bytes, seconds and stalled seconds a token; ``raw`` is the bandwidth in bytes."""

    size: str
    streamed: float
    seconds: float
    stalled: float
    raw: float


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds = ``start`` + bytes x ``slope``; ``r_squared`` is the share of the variance that it explains."""

    start: float
    slope: float
    r_squared: float


def fit(streamed: Sequence[float], seconds: Sequence[float]) -> Line:
    """Return the least-squares line of ``seconds`` over ``streamed`` bytes."""
    x, y = np.asarray(streamed, np.float64), np.asarray(seconds, np.float64)
    slope, start = np.polyfit(x, y, 1)
    rest, spread = ((y - start - slope * x) ** 2).sum(), ((y - y.mean()) ** 2).sum()
    return Line(float(start), float(slope), float(1 - rest / spread))


def measure(size: str, folder: Path, *, rounds: int, keep: bool) -> Point:
    """Return the medians of ``size``; its checkpoint is made and removed where it wasn't there."""
    checkpoint = (folder / size).resolve()
    existed = checkpoint.exists()
    try:
        return _measure(size, make(size, checkpoint), folder.resolve() / "linear", rounds)
    finally:
        if not existed and not keep:
            shutil.rmtree(checkpoint, ignore_errors=True)


def _measure(size: str, checkpoint: Path, work: Path, rounds: int) -> Point:
    plan = offstage_plan(checkpoint, work, [*OPTIONS, "max_memory={cpu: 1TB}"])
    options = [*OPTIONS, f"max_memory={{cpu: {2 * plan['reserves'].get('cpu', 0)}}}"]
    steps = min(max(round(STREAM_BYTES / plan["devices"]["disk"]["weights"]), STEPS[0]), STEPS[1])
    drop_page_cache()
    raw = direct_read_bandwidth(checkpoint)
    by_round = []
    for number in range(rounds):
        drop_page_cache()
        metrics = offstage_record(checkpoint, work, tokens=steps + 1, options=options)["metrics"]
        by_round.append(metrics)
        say(f"round {number + 1}  {size:5} {metrics[SECONDS]:.3f} s a token over {steps} tokens")
    shutil.rmtree(work)
    median = {name: statistics.median(metrics[name] for metrics in by_round) for name in (STREAMED, SECONDS, STALLED)}
    return Point(size, median[STREAMED], median[SECONDS], median[STALLED], raw)


def table(points: Sequence[Point]) -> list[str]:
    """Return the lines of the table."""
    lines = ["size   streamed a token  s a token  stall share  GB/s  raw GB/s"]
    for point in points:
        speed = point.streamed / point.seconds
        lines.append(
            f"{point.size:5}  {format_bytes(int(point.streamed)):>16}  {point.seconds:9.3f}  "
            f"{point.stalled / point.seconds:11.0%}  {speed / 1e9:4.2f}  {point.raw / 1e9:8.2f}"
        )
    return lines


def main() -> None:
    """Measure each size, print the table and the line, and draw them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", default=list(SHAPES), help=f"of {', '.join(SHAPES)}; all if none is given")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/offstage-bench"))
    parser.add_argument("--keep", action="store_true", help="leave the checkpoints that were made")
    parser.add_argument("--plot", type=Path, help="a .png to draw the table and the line into")
    arguments = parser.parse_args()
    if unknown := set(arguments.sizes) - set(SHAPES):
        parser.error(f"no such size: {', '.join(sorted(unknown))}")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    points = [measure(size, arguments.folder, rounds=arguments.rounds, keep=arguments.keep) for size in arguments.sizes]
    for text in table(points):
        say(text)
    if len(points) < 2:
        return
    line = fit([point.streamed for point in points], [point.seconds for point in points])
    say(f"{line.start:.3f} s + bytes / {1 / line.slope / 1e9:.2f} GB/s, R² = {line.r_squared:.5f}")
    if arguments.plot:
        from tests.benchmarks.linear_plot import draw

        draw(points, line, arguments.plot)


if __name__ == "__main__":
    main()
