"""What a streamed part costs in Python: microseconds a part, over a link that takes no time.

    python -m tests.benchmarks.part_overhead
    python -m tests.benchmarks.part_overhead --profile

A row of small linear layers waits on the host, and each is a part of its own, for an accelerator whose link does
nothing: what a pass takes beyond that of the plain model is what streaming costs the thread that runs the model. Prints
the medians over the rounds, in which plain and streamed passes take turns.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from offstage.stages.dispatch.transfer.arena import HostMemory
from offstage.stages.dispatch.transfer.link import Event, Piece
from offstage.stages.dispatch.transfer.links import SynchronousLink
from offstage.stages.units import DEVICE_ALIGNMENT
from tests.benchmarks.offload import say
from tests.stages.dispatch.placed_models import Layer, Setup

WIDTH = 32
SHARE = 4
"""The staging memory has room for one in so many parts."""


class InstantLink(SynchronousLink):
    """A link whose copies are asked for as those of an accelerator are, and that nothing crosses."""

    def __init__(self) -> None:
        super().__init__(partial(HostMemory, alignment=DEVICE_ALIGNMENT))

    def computed(self) -> Event:
        """Return a moment that has come."""
        return self

    def copy(self, pieces: Sequence[Piece], *, after: Event) -> Event:
        """Do nothing."""
        return after


def row(parts: int) -> nn.Sequential:
    """Return a model of so many parts, each of which holds a weight and a bias."""
    return nn.Sequential(*(Layer(nn.Linear(WIDTH, WIDTH)) for _ in range(parts))).eval().requires_grad_(False)


def seconds_a_pass(model: nn.Module, passes: int) -> float:
    """Return the median seconds of a pass of one row."""
    x, times = torch.ones(1, WIDTH), []
    with torch.no_grad():
        for _ in range(passes):
            began = time.perf_counter()
            model(x)
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure(plain: nn.Module, streamed: nn.Module, rounds: int, passes: int) -> Sequence[float]:
    """Return how many seconds a pass of ``streamed`` took longer than one of ``plain``, by the round."""
    seconds_a_pass(streamed, 3)
    return [seconds_a_pass(streamed, passes) - seconds_a_pass(plain, passes) for _ in range(rounds)]


def main() -> None:
    """Measure, and print the microseconds of a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--passes", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="print where a streamed pass spends its time")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        setup = Setup(
            row(given.parts), lambda name: "cpu", Path(folder), example=torch.ones(1, WIDTH),
            rooms={0: given.parts // SHARE * 8 * DEVICE_ALIGNMENT}, open_link=lambda *_: InstantLink(),
        )  # fmt: skip
        found = measure(row(given.parts), setup.model, given.rounds, given.passes)
        say(f"{1e6 * statistics.median(found) / given.parts:.1f} microseconds a part of {given.parts}")
        if given.profile:
            with cProfile.Profile() as profile:
                seconds_a_pass(setup.model, given.passes)
            pstats.Stats(profile).sort_stats("tottime").print_stats(30)
        setup.streamer.remove()


if __name__ == "__main__":
    main()
