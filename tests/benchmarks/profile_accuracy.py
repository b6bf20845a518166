"""How true a memory profile is: the peak of a training step as it says, and as the process really had it.

    python -m tests.benchmarks.profile_accuracy [resnet|llama] [--batch 8] [--ratios 0 0.5 1]

First without offload: as storages were counted, as rehearsed without data, and as the system tells it of this process
(VmHWM, over what it held before). The last has what kernels take inside themselves too: oneDNN's convolutions copy
their operands into another order, which no count of tensors sees. Then with a share of the activations on disk: the
peak that the profile predicts beside that of the process.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from offstage import CPUOffload, profile_memory
from offstage.pipeline.kept_memory import return_freed_memory
from offstage.stages.units import format_bytes
from tests.benchmarks.activation_scenes import Scene, llama, resnet
from tests.stages.finetune.high_water import taken_by

SCENES = {"resnet": resnet, "llama": llama}


def loss_of(output: object) -> torch.Tensor:
    """Return the loss of the scenes: the mean square of what the model says."""
    last: torch.Tensor = output.last_hidden_state  # type: ignore[attr-defined]
    return last.float().square().mean()


def taken(scene: Scene, around: AbstractContextManager[object]) -> int:
    """Return what the process took in a step, the third one, whose forward ran inside ``around``."""

    def step() -> None:
        with around:
            loss = loss_of(scene.model(scene.inputs))
        loss.backward()

    step()
    return taken_by(scene.model, step)


def line(name: str, predicted: int, was: int) -> str:
    """Return a line with the bytes that were ``predicted`` of a peak, what it ``was``, and how far off that is."""
    return f"{name:<22} {format_bytes(predicted):>10} {format_bytes(was):>10} {predicted / was - 1:+7.1%}"


def compare(scene: Scene, ratios: Sequence[float], folder: str) -> list[str]:
    """Return the table."""
    counted = profile_memory(scene.model, scene.inputs, loss=loss_of)
    rehearsed = profile_memory(scene.model, scene.inputs.to("meta"), data=False, loss=loss_of)
    assert rehearsed.peaks is not None
    whole = taken(scene, nullcontext())
    lines = [line("counted", counted.peak_bytes, whole), line("rehearsed", rehearsed.peak_bytes, whole)]
    for ratio in ratios:
        was = taken(scene, CPUOffload(ratio, tag=f"ratio {ratio}", target="disk", folder=folder))
        lines.append(line(f"with {ratio:g} offloaded", rehearsed.peaks.peak(ratio), was))
    return [f"{'peak of a step':<22} {'profile':>10} {'process':>10}", *lines]


def main(given: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scene", nargs="?", choices=sorted(SCENES), default="resnet")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--ratios", type=float, nargs="*", default=[0.1, 0.5, 1.0])
    arguments = parser.parse_args(given)
    return_freed_memory()
    scene = SCENES[arguments.scene](arguments.batch)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        print(*compare(scene, arguments.ratios, folder), sep="\n")


if __name__ == "__main__":
    main()
