"""The assistant of ``generate.assistant_model``: a second, small checkpoint that guesses tokens ahead for the model.

All of it is resident where the model computes, so a plan leaves room for it as for the request's own work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from offstage.pipeline.regular_files import read_object
from offstage.stages.checkpoints.checkpoint import open_checkpoint
from offstage.stages.checkpoints.generation_defaults import generation_defaults
from offstage.stages.checkpoints.hub import checkpoint_folder
from offstage.stages.checkpoints.quantization import quantization_of
from offstage.stages.checkpoints.weight_files import weight_files
from offstage.stages.empty_init.identity import MODEL_KEYS
from offstage.stages.inputs.generate_options import GUESSED, GUESSES
from offstage.stages.plan.request.geometry import geometry_of
from offstage.stages.units import DTYPE_BYTES


def assistant_node(path: str | None) -> dict[str, Any] | None:
    """Return the assistant in the folder ``path`` as a node ``model`` says it; null where there is none."""
    return {**MODEL_KEYS, "path": path} if path else None


def assistant_defaults(path: str | None) -> dict[str, Any]:
    """Return how many tokens the assistant in the folder ``path`` guesses at once where nothing is given, if it says.

    That is the assistant's own to say: what the model's files have of it isn't asked.
    """
    node = assistant_node(path)
    told = generation_defaults(checkpoint_folder(node)) if node else {}
    return {GUESSED: told.get(GUESSED)}


def assistant_bytes(path: str | None, *, prompt: int, length: int) -> int:
    """Return what the assistant takes for a sequence of ``length`` tokens in the end, ``prompt`` of them at once.

    That is its weights, in the dtype in which they rest or are unpacked to, its keys and values, and the widest moment
    of a layer. A folder without weights takes nothing here: the stage itself refuses it.
    """
    node = assistant_node(path)
    if node is None:
        return 0
    folder = checkpoint_folder(node)
    weights = assistant_weights(folder)
    config = read_object(folder / "config.json")
    geometry = geometry_of(config)
    width = int(DTYPE_BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 4))
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
