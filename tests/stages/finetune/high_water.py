"""What a step takes of a process, as the system tells it (VmHWM), beside what a profile says; a process of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from offstage.pipeline.kept_memory import return_freed_memory, return_heap
from offstage.stages.empty_init.training_peaks import run_backward
from offstage.stages.finetune import profile_memory


def convolutions() -> nn.Sequential:
    layers = [nn.Conv2d(3, 32, 3, padding=1)]
    for _ in range(12):
        layers += [nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)]
    return nn.Sequential(*layers)


def mlp() -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))))


NETS: Mapping[str, Callable[[], nn.Module]] = {"convolutions": convolutions, "mlp": mlp}
INPUTS = {"convolutions": (2, 3, 128, 128), "mlp": (100_000, 64)}


def status_bytes(key: str) -> int:
    match = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def taken_by(model: nn.Module, step: Callable[[], None]) -> int:
    """Return the bytes that the process took at most in ``step``, a second one, over what it held."""
    step()  # libraries take what they keep
    model.zero_grad()
    return_heap()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts anew
    before = status_bytes("VmRSS")
    step()
    taken = status_bytes("VmHWM") - before
    model.zero_grad()
    return taken


def compare(name: str) -> tuple[int, int]:
    """Return the peak of a step of the net ``name``, as its profile says and as it was."""
    model, x = NETS[name](), torch.randn(INPUTS[name])
    taken = taken_by(model, lambda: run_backward(model(x), None))
    return profile_memory(model, x).peak_bytes, taken


if __name__ == "__main__":
    return_freed_memory()
    print(json.dumps({name: compare(name) for name in NETS}))
