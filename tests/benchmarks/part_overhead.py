"""What streaming costs in Python: microseconds a tensor and a chunk, over a link that takes no time.

    python -m tests.benchmarks.part_overhead
    python -m tests.benchmarks.part_overhead --profile

Blocks of small linear layers wait on the host, for an accelerator whose link does nothing: what a pass takes beyond
that of the plain model is what streaming costs the thread that runs the model, where each weight is a part of its own,
and where there is room to bring those of a block together. What waits on disk is read in chunks: those of a part that
has many, of a page each that memory holds, cost the threads that read and the one that asks what a chunk of any size
costs in Python, and a little more. Prints the medians over the rounds, in which all take turns.
"""

from __future__ import annotations

import argparse
import cProfile
import os
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
from offstage.stages.dispatch.transfer.mover import Mover, Transfer
from offstage.stages.dispatch.transfer.part_layout import lay_out, read_lengths
from offstage.stages.dispatch.transfer.pinned_buffers import buffers_for
from offstage.stages.dispatch.transfer.traffic import Traffic
from offstage.stages.units import DEVICE_ALIGNMENT
from tests.benchmarks.offload import say
from tests.stages.dispatch.placed_models import Layer, Setup
from tests.stages.dispatch.transfer.test_mover import on_disk

WIDTH = 32
INSIDE = 9
"""A block has so many layers, as a Llama's has modules with weights."""
ROOMS = {"each a part of its own": 12, "those of a block together": 5 * INSIDE}
"""The staging memory, in weights."""
_PAGE = 4096


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


class Chunks:
    """A part that waits in so many chunks in a file of ``folder``, and what brings it, until ``stack`` is closed."""

    def __init__(self, count: int, folder: Path, stack: ExitStack) -> None:
        link, self.count = InstantLink(), count
        sources = [
            part[0] for part in on_disk([[torch.ones(_PAGE // 2).half()] for _ in range(count)], folder / "file")
        ]
        buffers = buffers_for(read_lengths(sources), link, staging_bytes=2 * count * _PAGE)
        self._mover = Mover(link, sources, device=0, buffers=buffers, traffic=Traffic())
        for closing in (buffers, self._mover):
            if closing is not None:
                stack.callback(closing.close)
        self._layout = lay_out(sources, link_room=2 * count * _PAGE)
        self._region = link.memory(self._layout.size).lend(0, self._layout.size)[0]

    def seconds(self, passes: int) -> float:
        """Return the median seconds that a chunk takes."""
        times = []
        for _ in range(passes):
            began, transfer = time.perf_counter(), Transfer(self._region)
            self._mover.fetch(self._layout, transfer)
            self._mover.wait([transfer], "it")
            times.append(time.perf_counter() - began)
        return statistics.median(times) / self.count


def main() -> None:
    """Measure, and print the microseconds of a tensor and of a chunk."""
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
        chunks, of_chunks = Chunks(INSIDE * given.blocks, memory_folder(stack), stack), list[float]()
        rounds = []
        for _ in range(given.rounds):
            rounds.append({way: seconds_a_pass(model, given.passes) for way, model in sides.items()})
            of_chunks.append(chunks.seconds(given.passes))
        for way, model in streamed.items():
            taken = statistics.median(each[way] - each["plain"] for each in rounds) / given.blocks / INSIDE
            say(f"{1e6 * taken:.1f} microseconds a tensor of {given.blocks * INSIDE}, {way}")
            if given.profile:
                with cProfile.Profile() as profile:
                    seconds_a_pass(model, given.passes)
                pstats.Stats(profile).sort_stats("tottime").print_stats(30)
        say(f"{1e6 * statistics.median(of_chunks):.1f} microseconds a chunk of {chunks.count}, read from memory")


def memory_folder(stack: ExitStack) -> Path:
    """Return a folder whose files are in memory, where there is such, until ``stack`` is closed."""
    where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return Path(stack.enter_context(TemporaryDirectory(dir=where)))


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
