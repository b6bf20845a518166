"""The folder that offloaded weights are in: made sure to hold what the model holds, and where each tensor lies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offstage.pipeline.errors import CheckpointError, ConfigError
from offstage.stages.checkpoints.dtypes import torch_dtype
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.empty_init.skeleton import Skeleton, TensorSpec
from offstage.stages.plan.plan import Plan
from offstage.stages.shard_load import OffloadedWeightsLoader, offload_state_dict
from offstage.stages.shard_load.expert_rows import locate_rows
from offstage.stages.shard_load.offload_store import plain_index
from offstage.stages.shard_load.sources import DiskWeights, TensorSource
from offstage.stages.units import DISK


def locate_weights(
    model: nn.Module,
    skeleton: Skeleton,
    plan: Plan,
    *,
    folder: Path | None,
    index: Mapping[str, Mapping[str, Any]] | None = None,
) -> DiskWeights:
    """Return each tensor that ``plan`` has on disk where it can be read, as the model holds it, tied names included.

    ``index`` says where they are; without one they are in ``folder``, after those that it lacks are written there. So
    is a tensor that lies somewhere in another dtype than the model's: what is streamed is never cast.
    """
    wanted = [spec for spec in skeleton.tensors if plan.homes[spec.name] == DISK and spec.persistent]
    if not wanted:
        return DiskWeights({})
    if index is None and folder is None:
        raise ConfigError("offload_dir: tensors are mapped to disk, and no folder is given to offload them to")
    if index is None and folder is not None:
        leaders = {spec.name for spec in wanted if skeleton.leader(spec.name) == spec.name}
        state = model.state_dict()
        store_weights({name: state[name] for name in state if name in leaders}, folder)
    stored = OffloadedWeightsLoader(save_folder=folder, index=index)
    experts = {name for spec in skeleton.experts for name in spec.tensors}
    sources: dict[str, TensorSource] = {}
    for spec in wanted:
        by_row = plan.serving.get(spec.name) == "experts"
        names = (spec.name, *skeleton.names_of(spec.name))  # the folder may have it by that of a twin
        known = next((name for name in names if name in stored.index), spec.name)
        at = tuple(_extents(stored, known, spec, folder=folder, by_row=by_row))
        rows = locate_rows(at, spec.shape, spec.dtype) if spec.name in experts else ()
        sources[spec.name] = TensorSource(spec, spec.name, DISK, "in_place" if len(at) == 1 else "by_expert", at, rows)
    return DiskWeights(sources)


def _extents(
    stored: OffloadedWeightsLoader, name: str, spec: TensorSpec, *, folder: Path | None, by_row: bool
) -> list[Extent]:
    """Return where the tensor lies as the model holds it: in one piece, or ``by_row`` in several."""
    if name not in stored.index:
        raise CheckpointError(f"offload_index: has no tensor {name!r}; give an index or a folder that has all of them")
    extents = stored.extents(name)
    shape = extents[0].shape if len(extents) == 1 else tuple(stored.index[name].get("shape", ()))
    in_rows = by_row and locate_rows(extents, spec.shape, spec.dtype)
    if shape == spec.shape and (in_rows or (len(extents) == 1 and extents[0].dtype == spec.dtype)):
        return extents
    if shape != spec.shape or folder is None:
        pieces = f" in {len(extents)} pieces" if len(extents) > 1 else ""
        raise CheckpointError(
            f"{extents[0].file.path}: tensor {name!r} is {extents[0].dtype} {list(shape)}{pieces} and the model's "
            f"{spec.dtype} {list(spec.shape)}; give offload_dir, a folder for what must be cast or put together"
        )
    offload_state_dict(folder, {spec.name: stored[name].to(torch_dtype(spec.dtype))})
    return OffloadedWeightsLoader(save_folder=folder).extents(spec.name)


def store_weights(weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write those of ``weights`` to ``folder`` that it doesn't have, or has with other values.

    A tensor on meta has no values: the folder must have it, else that is a ``CheckpointError``.
    """
    index = plain_index(folder)
    stored = OffloadedWeightsLoader(save_folder=folder, index=index)
    lacking: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if not tensor.is_meta:
            if name not in index or not _same(stored, index, name=name, tensor=tensor):
                lacking[name] = tensor
        elif name not in index or index[name].get("shape", list(tensor.shape)) != list(tensor.shape):
            raise CheckpointError(
                f"{folder}: has no tensor {name!r} of shape {list(tensor.shape)}, and neither has the model; "
                "load the weights, or give the folder that they were offloaded to"
            )
    offload_state_dict(folder, lacking)


def _same(
    stored: Mapping[str, torch.Tensor], index: Mapping[str, Mapping[str, Any]], *, name: str, tensor: torch.Tensor
) -> bool:
    """Return whether the folder's tensor is this one; its shape and dtype are compared before its data is read."""
    if index[name].get("shape", list(tensor.shape)) != list(tensor.shape):
        return False
    try:
        stored_tensor = stored[name]
    except (CheckpointError, OSError):
        return False  # damaged: it is written anew
    return stored_tensor.dtype == tensor.dtype and torch.equal(stored_tensor, tensor.cpu())
