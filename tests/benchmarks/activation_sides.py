"""One side of the benchmark of activations, in a process of its own.

    python -m tests.benchmarks.activation_sides --place disk --side 0.5 --scene resnet50 --batch 8 --folder /tmp/spill

It warms up, does some iterations, and prints one line of JSON: the median of their seconds, the peak of activations and
the bytes that went away and came back in the last, and a hash of its gradients.

Three places:

- ``disk``: the cpu alone. Saved tensors spill to disk. The peak is the process's own (VmHWM), over what it held
  before the iteration. Blocks that are freed go back to the system at once, as in every run of offstage.
- ``simulated``: an accelerator that isn't there. The ledger's peak is that of saved tensors, those that came back among
  them; what a layer computes with beside them isn't counted. The plain step's is counted by storages, without a ledger.
  Times say nothing about a real one.
- ``cuda``: the accelerator's allocator tells the peak, over what was there before the iteration.

``save_on_cpu`` is torch's own on the cpu, where it copies nothing, and with pinned memory on CUDA. On a simulated
accelerator it is torch's rule on our ledger: all that is saved goes to the host, each time it is saved.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import statistics
import sys
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from offstage.pipeline.kept_memory import return_freed_memory
from offstage.stages.dispatch.transfer.trace import Trace
from offstage.stages.finetune import CPUOffload
from offstage.stages.machine.devices import Devices
from tests.benchmarks.activation_scenes import SCENES, Scene

SIDES = ("none", "save_on_cpu", "0", "0.1", "0.5", "1")
"""The plain step, torch's way, and ratios of ours."""
TAG = "step"
OUT, BACK = "activations out", "activations back"
"""What ours calls its spans on a time line."""
PLENTY = 1 << 50
WARM_UP = 2
"""Iterations before the first that counts: in the first, ours measures what is saved."""


@dataclass(frozen=True, slots=True)
class SideRun:
    """What a side did: median seconds an iteration; of the last one peak, bytes away and back, hash of gradients."""

    side: str
    seconds: float
    peak: int
    out: int
    back: int
    gradients: str


class MovedBytes(Trace):
    """A time line that adds up what went away and came back on it."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: list[tuple[str, int]] = []  # any thread adds to it

    def add(self, name: str, category: str, began: float, **details: Any) -> None:
        super().add(name, category, began, **details)
        self._counts.append((name, details.get("bytes", 0)))

    def total(self, name: str) -> int:
        """Return the bytes of all spans called ``name``."""
        return sum(count for known, count in self._counts if known == name)

    def over(self, hooks: saved_tensors_hooks) -> saved_tensors_hooks:
        """Return ``hooks`` whose ways out and back are put down here, as ours are."""

        def pack(tensor: torch.Tensor) -> Any:
            with self.span(OUT, "copy", bytes=tensor.nbytes):
                return hooks.pack_hook(tensor)

        def unpack(packed: Any) -> torch.Tensor:
            began = time.perf_counter()
            tensor: torch.Tensor = hooks.unpack_hook(packed)
            self.add(BACK, "copy", began, bytes=tensor.nbytes)
            return tensor

        return saved_tensors_hooks(pack, unpack)


class LiveSaves(saved_tensors_hooks):
    """Counts what a plain step saves until it is let go, by storages; the ``weights`` are left out."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        self.peak = self._allocated = 0
        self._counted = {weight.untyped_storage().data_ptr() for weight in weights}
        super().__init__(self._count, lambda tensor: tensor)

    def _count(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._counted:
            self._counted.add(storage.data_ptr())
            self._allocated += storage.nbytes()
            self.peak = max(self.peak, self._allocated)
            weakref.finalize(storage, self._forget, storage.data_ptr(), storage.nbytes()).atexit = False
        return tensor.detach()

    def _forget(self, address: int, count: int) -> None:
        self._counted.remove(address)
        self._allocated -= count


class TensorPlace:
    """The cpu alone: what is around a side's forward pass there, and how its peak is told."""

    device = torch.device("cpu")

    def __init__(self, side: str, model: nn.Module, folder: Path) -> None:
        self.side, self.model, self.folder, self.trace = side, model.to(self.device), folder, MovedBytes()
        self._before = 0

    def begin(self) -> None:
        """Begin an iteration: its peak and what it moves count from here."""
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts anew
        self._before = status_bytes("VmRSS")

    def end(self) -> None:
        """End an iteration when all of it is done."""

    def peak(self) -> int:
        """Return the peak of activations of the iteration, in bytes."""
        return status_bytes("VmHWM") - self._before

    def around(self) -> AbstractContextManager[Any]:
        """Return what is around a forward pass."""
        if self.side == "none":
            return nullcontext()
        return save_on_cpu() if self.side == "save_on_cpu" else self._offload(target="disk", folder=self.folder)

    def _offload(self, **options: Any) -> CPUOffload:
        return CPUOffload(float(self.side), TAG, trace=self.trace, **options)


class SimulatedPlace(TensorPlace):
    """An accelerator that isn't there: its ledger counts what is saved and stays, and what comes back."""

    def __init__(self, side: str, model: nn.Module, folder: Path) -> None:
        super().__init__(side, model, folder)
        self._devices = Devices({0: PLENTY})
        ledger = self._devices.ledger(0)
        assert ledger is not None
        self._ledger = ledger

    def begin(self) -> None:
        self._live = LiveSaves(self.model.parameters())
        self._ledger.peak = self._ledger.allocated

    def peak(self) -> int:
        return self._live.peak if self.side == "none" else self._ledger.peak

    def around(self) -> AbstractContextManager[Any]:
        if self.side == "none":
            return self._live
        if self.side == "save_on_cpu":
            on_host = saved_tensors_hooks(
                lambda tensor: tensor.detach().clone(), lambda kept: self._devices.put(kept, 0)
            )
            return self.trace.over(on_host)
        return self._offload(devices=self._devices)


class CudaPlace(TensorPlace):
    """A real accelerator."""

    device = torch.device("cuda", 0)

    def begin(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    def end(self) -> None:
        torch.cuda.synchronize()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() - self._before

    def around(self) -> AbstractContextManager[Any]:
        if self.side == "none":
            return nullcontext()
        return self.trace.over(save_on_cpu(pin_memory=True)) if self.side == "save_on_cpu" else self._offload()


PLACES: dict[str, type[TensorPlace]] = {"disk": TensorPlace, "simulated": SimulatedPlace, "cuda": CudaPlace}


def status_bytes(name: str) -> int:
    """Return what ``/proc/self/status`` says of ``name``, in bytes."""
    match = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def run(scene: Scene, place: TensorPlace, iterations: int) -> SideRun:
    """Do the iterations of one side."""
    seconds, inputs = [], scene.inputs.to(place.device)
    for _ in range(WARM_UP + iterations):
        place.trace = MovedBytes()
        place.begin()
        began = time.perf_counter()
        scene.step(inputs, place.around(), place.trace)
        place.end()
        seconds.append(time.perf_counter() - began)
    peak, moved = place.peak(), place.trace
    digest = hashlib.sha256()
    for gradient in scene.gradients():
        digest.update(gradient.cpu().contiguous().view(torch.uint8).numpy().data)
    return SideRun(
        place.side,
        statistics.median(seconds[WARM_UP:]),
        peak,
        moved.total(OUT),
        moved.total(BACK),
        digest.hexdigest()[:16],
    )


def main(given: Sequence[str] | None = None) -> None:
    """Run the side that is asked for and print what it did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--place", choices=PLACES, required=True)
    parser.add_argument("--side", choices=SIDES, required=True)
    parser.add_argument("--scene", choices=SCENES, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--trace", type=Path, help="a file for the time line of the last iteration")
    arguments = parser.parse_args(given)
    return_freed_memory()
    scene = SCENES[arguments.scene](arguments.batch)
    place = PLACES[arguments.place](arguments.side, scene.model, arguments.folder)
    done = run(scene, place, arguments.iterations)
    if arguments.trace:
        place.trace.save(arguments.trace)
    sys.stdout.write(json.dumps(asdict(done)) + "\n")


if __name__ == "__main__":
    main()
