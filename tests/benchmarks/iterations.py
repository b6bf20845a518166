"""Does an offload of activations leave anything behind? Many iterations, at ratios and batch sizes that change.

    python -m tests.benchmarks.iterations --iterations 1000

Prints, now and then, what the process holds: memory, descriptors, Python's objects, files in the folder of the offload
and memory or files that the offload has for what goes. Exits 1 where any of it has grown since the first fifth by more
than a part in fifty.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offstage.stages.finetune import CPUOffload
from offstage.stages.machine.devices import Devices

TAG = "iterations"
WIDTH, DEPTH = 64, 6
ROWS = (64, 64, 200)
RATIOS = tuple(sixth / 6 for sixth in range(7))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of each target; return 1 if something grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=1000)
    count = parser.parse_args(arguments).iterations
    grown = []
    for target in ("host", "disk"):
        with tempfile.TemporaryDirectory() as folder:
            states = iterate(target, Path(folder), count)
        for step, state in states.items():
            print(f"{target:5}{step:6}", *(f"{name} {value}" for name, value in state.items()), sep="  ")
        early, late = list(states.values())[1], list(states.values())[-1]
        grown += [f"{target}: {name}" for name in early if late[name] > 1.02 * early[name]]
    print("flat" if not grown else f"grown: {', '.join(grown)}")
    return 1 if grown else 0


def iterate(target: str, folder: Path, count: int) -> dict[int, dict[str, int]]:
    """Run ``count`` iterations; return the state after each tenth of them."""
    model = nn.Sequential(*(layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
    where: Mapping[str, Any] = {"devices": Devices({0: 2**30})}
    if target == "disk":
        where = {"target": "disk", "folder": folder}
    states = {}
    for step in range(1, count + 1):
        inputs = torch.rand(ROWS[step % len(ROWS)], WIDTH)
        with CPUOffload(RATIOS[step % len(RATIOS)], f"{TAG} {target}", **where) as offload:
            loss = model(inputs).square().sum()
        loss.backward()
        model.zero_grad()
        if step % max(count // 10, 1) == 0:
            states[step] = state(offload, folder)
    return states


def state(offload: CPUOffload, folder: Path) -> dict[str, int]:
    """Return what the process holds now; memory in kB."""
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return {
        "anonymous": next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "objects": len(gc.get_objects()),
        "files": len(list(folder.iterdir())),
        "reserved": sum(store.size for store in offload._history.stores),
    }


if __name__ == "__main__":
    sys.exit(main())
