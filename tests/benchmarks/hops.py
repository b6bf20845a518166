"""Through how many functions a streamed byte goes, from the call that needs it to the system's read, and which.

    python -m tests.benchmarks.hops

Those of this project that are under way in the thread that runs the model as the read is asked for, and then in the
thread that reads, as the system is asked. The most that there are in passes of a dense model on the host, for what its
calls ask for and for what is asked for as a pass begins; and of a mixture with room for some experts.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import torch
from torch import nn

from offstage.stages.dispatch.transfer.reading_threads import ReadingThreads, reader_pool
from tests.benchmarks.offload import say
from tests.stages.dispatch.experts.mixtures import mixture, waiting_experts
from tests.stages.dispatch.placed_models import Setup, net, to_disk
from tests.stages.shard_load.checkpoints import disk_weights

_OURS, _TESTS = f"{os.sep}stages{os.sep}", f"{os.sep}tests{os.sep}"
_ASKS = ReadingThreads.submit.__code__
X = torch.ones(256)
_BEGINS = "ModelPasses._before"


def functions_around(frame: FrameType | None) -> list[str]:
    """Return the functions of the project that are under way around ``frame``, the outermost first."""
    names = []
    while frame is not None:
        code = frame.f_code
        if _OURS in code.co_filename and _TESTS not in code.co_filename and not code.co_name.startswith("<"):
            names.append(code.co_qualname)
        frame = frame.f_back
    return names[::-1]


def hops_of(call: Callable[[], object], *, at_begin: bool = False) -> list[str]:
    """Return the most functions, in order, that a byte goes through which ``call`` reads, asked for ``at_begin``s of
    passes or in them.
    """
    asking: list[list[str]] = []
    reading: list[list[str]] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code is _ASKS:
            asking.append(functions_around(frame))
        elif event == "c_call" and argument is os.preadv:
            reading.append(functions_around(frame))

    reader_pool.cache_clear()  # threads that start now are seen
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        reader_pool.cache_clear()
    asked = [chain for chain in asking if (_BEGINS in chain) == at_begin]
    return [*max(asked, key=len), *max(reading, key=len)]


def of_a_part(folder: Path, *, at_begin: bool = False) -> list[str]:
    """Return those of a part of a dense model that the host computes, from a disk."""
    computing: dict[str, Any] = {"execution": lambda module: "cpu", "serving": "direct", "staging_bytes": 10**6}
    setup = Setup(net(len(X)), lambda name: "disk", folder, example=X, **computing)
    try:
        return hops_of(partial(_call_out_of_order, setup.model), at_begin=at_begin)
    finally:
        setup.streamer.remove()


def _call_out_of_order(model: nn.Sequential) -> None:
    """Call ``model``, and then a part of it that nobody expects."""
    model(X)
    model[2](X)


def of_an_expert(folder: Path) -> list[str]:
    """Return those of an expert that the host computes, from a disk."""
    model = mixture("Mixtral", torch.float32)
    stacks = {name for name, each in model.named_parameters() if each.dim() == 3}
    extents = to_disk(model, stacks, folder / "experts")
    rows = {name: [(at.rows(row, row + 1),) for row in range(at.shape[0])] for name, at in extents.items()}
    stored = disk_weights(extents, rows)
    with torch.no_grad(), waiting_experts(model, 8, stored=stored, computes="cpu"):
        return hops_of(partial(model, torch.tensor([[5]])))


def main() -> None:
    """Print both."""
    begun = partial(of_a_part, at_begin=True)
    for what, find in (("a part", of_a_part), ("a part, as a pass begins", begun), ("an expert", of_an_expert)):
        with TemporaryDirectory() as folder:
            hops = find(Path(folder))
        say(f"{what}: {len(hops)} functions: {', '.join(hops)}")


if __name__ == "__main__":
    main()
