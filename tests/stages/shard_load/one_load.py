"""One load in a process of its own: ``python -m tests.stages.shard_load.one_load ROOT FILE CPU_SHARE``.

Prints as JSON what the process held before, the bytes of the weights that stay, and how many of the values are right.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

from offstage.pipeline.kept_memory import return_freed_memory
from offstage.stages.empty_init.init import init_empty_weights
from tests.stages.shard_load.checkpoints import load, make_context
from tests.stages.shard_load.test_load_memory import anonymous_bytes

TENSORS, SHAPE = 12, (4096, 4096)


class Stack(nn.Module):
    """Twelve bfloat16 tensors of 32 MiB, 403 MB in all."""

    def __init__(self) -> None:
        super().__init__()
        weights = (torch.empty(SHAPE, dtype=torch.bfloat16) for _ in range(TENSORS))
        self.weights = nn.ParameterList([nn.Parameter(weight, requires_grad=False) for weight in weights])


def make() -> nn.Module:
    """Return the stack without its weights."""
    with init_empty_weights():
        return Stack()


def main() -> None:
    """Load the file, the first tensors onto the host, the others left on disk, with a job's way to free memory."""
    return_freed_memory()
    root, file, on_host = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    context = make_context(root, file, make, lambda name: "cpu" if int(name.split(".")[1]) < on_host else "disk")
    base = anonymous_bytes()
    model = load(context, root / "out").model
    right = sum(bool((model.weights[number] == number).all()) for number in range(on_host))
    sys.stdout.write(json.dumps({"base": base, "weights": on_host * model.weights[0].nbytes, "right": right}) + "\n")


if __name__ == "__main__":
    main()
