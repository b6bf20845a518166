"""Profile a training step of a ResNet-50, or of a small Llama: the table, and what the process really took.

    python -m tests.benchmarks.profile [resnet|llama] [--batch 8] [--depth 3] [--json] [--rehearsed]

The peak of a step is given thrice: as storages were counted, as it was rehearsed without data, and as the system tells
it of this process (VmHWM, over what it held before). The last has what kernels take inside themselves too: oneDNN's
convolutions take copies of their operands in another order, which no count of tensors sees.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from offstage import profile_memory
from rich.console import Console

from pipeline.malloc import return_freed_memory
from stages.finetune.module_profile import MemoryProfile
from stages.units import format_bytes
from tests.benchmarks.activation_scenes import Scene, llama, resnet
from tests.stages.finetune.high_water import taken_by

SCENES = {"resnet": resnet, "llama": llama}
_WIDTH = 180


def loss_of(output: object) -> torch.Tensor:
    """Return the loss of the scenes: the mean square of what the model says."""
    last: torch.Tensor = output.last_hidden_state  # type: ignore[attr-defined]
    return last.float().square().mean()


def rehearsed(scene: Scene) -> MemoryProfile:
    """Return the profile without data."""
    return profile_memory(scene.model, scene.inputs.to("meta"), data=False, loss=loss_of)


def compare(scene: Scene, profile: MemoryProfile) -> list[str]:
    """Return lines that set the peaks side by side."""

    def step() -> None:
        loss_of(scene.model(scene.inputs)).backward()

    taken = taken_by(scene.model, step)
    found = {"counted": profile.peak_bytes, "rehearsed": rehearsed(scene).peak_bytes}
    lines = [f"{name:<10} {format_bytes(count):>10} {count / taken - 1:+.1%}" for name, count in found.items()]
    return [*lines, f"{'process':<10} {format_bytes(taken):>10}"]


def main(given: Sequence[str] | None = None) -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scene", nargs="?", choices=sorted(SCENES), default="resnet")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--depth", type=int, help="the levels of modules that are shown; all by default")
    parser.add_argument("--json", action="store_true", help="the profile as JSON, and no more")
    parser.add_argument("--rehearsed", action="store_true", help="without data: no memory taken, no seconds")
    arguments = parser.parse_args(given)
    return_freed_memory()
    scene = SCENES[arguments.scene](arguments.batch)
    profile = rehearsed(scene) if arguments.rehearsed else profile_memory(scene.model, scene.inputs, loss=loss_of)
    if arguments.json:
        print(profile.json())
        return
    Console(width=_WIDTH).print(profile.table(arguments.depth))
    if not arguments.rehearsed:
        print("\nthe peak of a step", *compare(scene, profile), sep="\n")


if __name__ == "__main__":
    main()
