"""The folder that offloaded weights are in, made sure to hold what the model holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pipeline.errors import CheckpointError
from stages.shard_load import OffloadedWeightsLoader, offload_state_dict
from stages.shard_load.offload_store import read_index


def store_weights(weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write those of ``weights`` to ``folder`` that it doesn't have, or has with other values.

    A tensor on meta has no values: the folder must have it, else that is a ``CheckpointError``.
    """
    index = read_index(folder)
    stored = OffloadedWeightsLoader(save_folder=folder, index=index)
    for name, tensor in weights.items():
        if not tensor.is_meta:
            if name not in index or not _same(stored, index, name=name, tensor=tensor):
                offload_state_dict(folder, {name: tensor})
        elif name not in index or list(index[name].get("shape", tensor.shape)) != list(tensor.shape):
            raise CheckpointError(
                f"{folder}: has no tensor {name!r} of shape {list(tensor.shape)}, and neither has the model; "
                "load the weights, or give the folder that they were offloaded to"
            )


def _same(
    stored: Mapping[str, torch.Tensor], index: Mapping[str, Mapping[str, Any]], *, name: str, tensor: torch.Tensor
) -> bool:
    """Return whether the folder's tensor is this one; its shape and dtype are compared before its data is read."""
    if list(index[name].get("shape", tensor.shape)) != list(tensor.shape):
        return False
    try:
        found = stored[name]
    except (CheckpointError, OSError):
        return False  # damaged: it is written anew
    return found.dtype == tensor.dtype and torch.equal(found, tensor.cpu())
