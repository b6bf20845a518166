"""The assistant of ``generate.assistant_model``: a second, small checkpoint that guesses tokens ahead for the model.

All of it is resident where the model computes, so a plan leaves room for it as for the request's own work.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offstage.pipeline.regular_files import read_object
from offstage.stages.checkpoints.checkpoint import open_checkpoint
from offstage.stages.checkpoints.hub import checkpoint_folder
from offstage.stages.checkpoints.quantization import quantization_of
from offstage.stages.checkpoints.weight_files import weight_files
from offstage.stages.empty_init.identity import MODEL_KEYS
from offstage.stages.plan.request.geometry import geometry_of
from offstage.stages.units import DTYPE_BYTES

KEY = "assistant_model"
GUESSES = 20
"""How many tokens transformers has guessed at once where nothing else is said."""


def assistant_node(generate: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the assistant of the config node ``generate`` as a node ``model`` says it; null where there is none."""
    path = generate.get(KEY)
    return {**MODEL_KEYS, "path": path} if isinstance(path, str) and path else None


def assistant_bytes(generate: Mapping[str, Any], *, prompt: int, length: int) -> int:
    """Return what the assistant takes for a sequence of ``length`` tokens in the end, ``prompt`` of them at once.

    That is its weights, in the dtype in which they rest or are unpacked to, its keys and values, and the widest moment
    of a layer. A folder without weights takes nothing here: the stage itself refuses it.
    """
    node = assistant_node(generate)
    if node is None:
        return 0
    folder = checkpoint_folder(node)
    weights = assistant_weights(folder)
    config = read_object(folder / "config.json")
    geometry, width = (
        geometry_of(config),
        int(DTYPE_BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 4)),
    )
    cache = (geometry.layers + 1) * geometry.cached * length * width
    rows = max(prompt, GUESSES) * (6 * geometry.hidden + 2 * geometry.intermediate) * width
    return weights + cache + max(rows, 2 * length * geometry.hidden * width) + geometry.vocabulary * (width + 4 * 4)


def assistant_weights(folder: Path) -> int:
    """Return the bytes of the weights in ``folder`` in use: those at rest, unless they are quantised."""
    if quantization_of(folder) is None:
        return sum(file.stat().st_size for file in weight_files(folder))
    from offstage.stages.checkpoints.packed import in_dtype
    from offstage.stages.checkpoints.readers import open_reader

    dtype = str(read_object(folder / "config.json").get("dtype"))
    return sum((in_dtype(rest, dtype) or rest).bytes for rest in open_reader(open_checkpoint(folder)).entries.values())
