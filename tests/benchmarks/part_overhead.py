"""What streaming costs in Python: microseconds a tensor, over a link that takes no time.

    python -m tests.benchmarks.part_overhead
    python -m tests.benchmarks.part_overhead --profile

Blocks of small linear layers wait on the host, for an accelerator whose link does nothing: what a pass takes beyond
that of the plain model is what streaming costs the thread that runs the model, where each weight is a part of its own,
and where there is room to bring those of a block together. Prints the medians over the rounds, in which the three take
turns.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
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
INSIDE = 9
"""A block has so many layers, as a Llama's has modules with weights."""
ROOMS = {"each a part of its own": 12, "those of a block together": 5 * INSIDE}
"""The staging memory, in weights."""


class InstantLink(SynchronousLink):
    """A link whose copies are asked for as those of an accelerator are, and that nothing crosses."""

    def __init__(self) -> None:
        super().__init__(partial(HostMemory, alignment=DEVICE_ALIGNMENT))

    def computed(self) -> Event:
        """Return a moment that has come."""
        return self

    def copy(self, pieces: Sequence[Piece], *, after: Event, urgent: bool = False) -> Event:
        """Do nothing."""
        return after


class Block(nn.Module):
    """Calls layers one after another, each of which holds a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(INSIDE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the last layer makes of ``x``."""
        for layer in self.layers:
            x = layer(x)
        return x


def row(blocks: int) -> nn.Sequential:
    """Return a model of so many blocks."""
    return nn.Sequential(*(Block() for _ in range(blocks))).eval().requires_grad_(False)


def seconds_a_pass(model: nn.Module, passes: int) -> float:
    """Return the median seconds of a pass of one row."""
    x, times = torch.ones(1, WIDTH), []
    with torch.no_grad():
        for _ in range(passes):
            began = time.perf_counter()
            model(x)
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    """Measure, and print the microseconds of a tensor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=22)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--passes", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="print where a streamed pass spends its time")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with ExitStack() as stack:
        streamed = {way: stream(row(given.blocks), room, stack) for way, room in ROOMS.items()}
        sides = {"plain": row(given.blocks), **streamed}
        for model in sides.values():
            seconds_a_pass(model, 3)
        rounds = [
            {way: seconds_a_pass(model, given.passes) for way, model in sides.items()} for _ in range(given.rounds)
        ]
        for way, model in streamed.items():
            taken = statistics.median(each[way] - each["plain"] for each in rounds) / given.blocks / INSIDE
            say(f"{1e6 * taken:.1f} microseconds a tensor of {given.blocks * INSIDE}, {way}")
            if given.profile:
                with cProfile.Profile() as profile:
                    seconds_a_pass(model, given.passes)
                pstats.Stats(profile).sort_stats("tottime").print_stats(30)


def stream(model: nn.Module, room: int, stack: ExitStack) -> nn.Module:
    """Return ``model``, which streams from the host through so many weights' room until ``stack`` is closed."""
    folder = Path(stack.enter_context(TemporaryDirectory()))
    rooms = {0: room * WIDTH * WIDTH * torch.float32.itemsize}
    setup = Setup(
        model, lambda name: "cpu", folder, example=torch.ones(1, WIDTH), rooms=rooms, open_link=lambda *_: InstantLink()
    )
    stack.callback(setup.streamer.remove)
    return model


if __name__ == "__main__":
    main()
