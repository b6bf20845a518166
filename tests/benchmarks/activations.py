"""Activations offloaded by ratio: seconds, peaks and bytes beside torch's ``save_on_cpu`` and the plain step.

    python -m tests.benchmarks.activations --plot peak.png --trace trace.json       # ResNet-50, batch 8, on the cpu
    python -m tests.benchmarks.activations --places cuda --batch 256                # the reference's own table
    python -m tests.benchmarks.activations --scene llama --places simulated
    python -m tests.benchmarks.activations --profile 3                              # its memory, module by module

Forward and backward of a ResNet-50, without an optimizer, at the ratios 0, 0.1, 0.5 and 1, on each place that is asked
for (``tests/benchmarks/activation_sides.py`` says what they are and how each tells its peak). A side is a process of
its own; in each round all take their turn, another one first. A simulated accelerator's times say nothing: it has one
round. The table has medians over the rounds; in the same run the limit is measured: the disk's raw writes and reads,
copies in the host's memory, pinned copies over the link. ``at the limit`` is how long the moved bytes take at those
rates alone. Sides whose gradients differ are named; on CUDA some kernels add in another order each time, so that the
plain step's may differ from themselves.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console

from offstage.stages.finetune import profile_memory
from offstage.stages.machine.probes import link_speed
from offstage.stages.units import format_bytes
from tests.benchmarks.activation_scenes import SCENES, Scene
from tests.benchmarks.activation_sides import PLACES, SIDES, SideRun
from tests.benchmarks.offload import say
from tests.benchmarks.sides import in_turn, need_accelerator
from tests.benchmarks.storage import direct_bandwidths, memory_bandwidth, pinned_bandwidth

WIDTH = 150
"""Columns of a printed profile."""
TRACED = "0.5"
"""The side whose iteration is drawn on a time line."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes a second away from the device, and back to it."""

    out: float
    back: float


@dataclass(frozen=True, slots=True)
class PlaceResult:
    """What the sides did at one place, medians over the rounds, and the ``limit`` of moving bytes there."""

    place: str
    limit: Rates
    sides: tuple[SideRun, ...]


LIMITS: Mapping[str, Callable[[Path], Rates]] = {
    "disk": lambda folder: Rates(*direct_bandwidths(folder)),
    "simulated": lambda _: Rates(*[memory_bandwidth()] * 2),
    "cuda": lambda _: Rates(pinned_bandwidth(), link_speed()),
}


def measure(place: str, arguments: argparse.Namespace) -> PlaceResult:
    """Run the rounds at ``place``."""
    limit = LIMITS[place](arguments.folder)
    runs_of: dict[str, list[SideRun]] = {side: [] for side in arguments.sides}
    for number in range(1 if place == "simulated" else arguments.rounds):
        for side in in_turn(arguments.sides, number):
            runs_of[side].append(run_side(place, side, arguments))
            run = runs_of[side][-1]
            say(f"round {number + 1}  {place:10} {side:12} {run.seconds:.3f} s  peak {format_bytes(run.peak)}")
    return PlaceResult(place, limit, tuple(median_of(runs) for runs in runs_of.values()))


def run_side(place: str, side: str, arguments: argparse.Namespace) -> SideRun:
    """Run one side in a process of its own."""
    options = {name: getattr(arguments, name) for name in ("scene", "batch", "iterations", "folder")}
    if arguments.trace and (place, side) == ("simulated", TRACED):
        options["trace"] = arguments.trace
    given = [f"--{name}={value}" for name, value in {"place": place, "side": side, **options}.items()]
    command = [sys.executable, "-m", "tests.benchmarks.activation_sides", *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{place} {side} failed: {done.stderr.strip()[-2000:]}")
    return SideRun(**json.loads(done.stdout.splitlines()[-1]))


def median_of(runs: Sequence[SideRun]) -> SideRun:
    """Return the medians of one side's runs; bytes and gradients are those of the last."""
    seconds = statistics.median(run.seconds for run in runs)
    peak = round(statistics.median(run.peak for run in runs))
    last = runs[-1]
    return SideRun(last.side, seconds, peak, last.out, last.back, last.gradients)


def table(result: PlaceResult) -> list[str]:
    """Return the lines of the table of one place."""
    plain = result.sides[0]
    limit = f"{result.limit.out / 1e9:.2f} GB/s away, {result.limit.back / 1e9:.2f} GB/s back"
    lines = [
        f"{result.place}: raw {limit}",
        f"{'side':12}  s/iteration  of {plain.side}  {'peak':>10}  of {plain.side}  {'away':>10}  {'back':>10}"
        "  at the limit",
    ]
    for side in result.sides:
        least = side.out / result.limit.out + side.back / result.limit.back
        lines.append(
            f"{side.side:12}  {side.seconds:11.3f}  {side.seconds / plain.seconds:7.2f}  {format_bytes(side.peak):>10}"
            f"  {side.peak / plain.peak:7.1%}  {format_bytes(side.out):>10}  {format_bytes(side.back):>10}"
            f"  {least:10.3f} s"
        )
    return [*lines, verdict(result)]


def verdict(result: PlaceResult) -> str:
    """Return which sides have other gradients than the first."""
    others = [side.side for side in result.sides if side.gradients != result.sides[0].gradients]
    if not others:
        return "all gave bitwise the same gradients"
    return f"other gradients than {result.sides[0].side}: {', '.join(others)}"


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    """Return what was asked for; ends the process where it asks for an accelerator and there is none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--places", nargs="+", choices=PLACES, default=["disk", "simulated"])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="the first is the baseline")
    parser.add_argument("--scene", choices=SCENES, default="resnet50")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=3, help="in each round, after two that warm up")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/offstage-bench/activations"), help="for what spills")
    parser.add_argument("--json", type=Path, help="a file for the results")
    parser.add_argument("--profile", type=int, metavar="DEPTH", help="print the profile of one step instead")
    parser.add_argument("--rehearsed", action="store_true", help="have the profile without data: no memory, no seconds")
    parser.add_argument("--plot", type=Path, help="a .png to draw peaks against ratios into")
    parser.add_argument("--trace", type=Path, help=f"a file for the time line of ratio {TRACED}, simulated")
    arguments = parser.parse_args(given)
    if "cuda" in arguments.places:
        need_accelerator(parser, ": leave out the place cuda")
    return arguments


def profile(scene: Scene, depth: int, *, data: bool) -> None:
    """Print what a step of ``scene`` takes by module, down to ``depth`` levels, after one that warms up."""
    if data:
        profile_memory(scene.model, scene.inputs)
    table = profile_memory(scene.model, scene.inputs, data=data).table(depth)
    Console(width=WIDTH).print(table)


def main(given: Sequence[str] | None = None) -> None:
    """Run the rounds, print the tables, and write what was asked for; or print a profile."""
    arguments = parse(given)
    if arguments.profile:
        return profile(SCENES[arguments.scene](arguments.batch), arguments.profile, data=not arguments.rehearsed)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    results = [measure(place, arguments) for place in arguments.places]
    for result in results:
        for line in ("", *table(result)):
            say(line)
    if arguments.json:
        asked = {"scene": arguments.scene, "batch": arguments.batch, "torch": torch.__version__}
        report = {"asked": asked, "places": [asdict(result) for result in results]}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    if arguments.plot:
        from tests.benchmarks.activations_plot import draw

        draw(results, arguments.plot)
    return None


if __name__ == "__main__":
    main()
