"""The config keys of shard_load, what can be wrong with them, and the checkpoint that they are about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from offstage.pipeline.errors import CheckpointError, Fault, StorageError
from offstage.pipeline.typed_config import PATHS, absolute
from offstage.stages.checkpoints.adapters import adapter_folder, open_adapter
from offstage.stages.checkpoints.checkpoint import Checkpoint, Depth, open_checkpoint
from offstage.stages.checkpoints.hub import fault_offline, is_hub_id, local_snapshot, weights_path


@dataclass(frozen=True, slots=True)
class ShardLoadConfig:
    """Where weights go that can't be read from the checkpoint as they are, and how much is checked."""

    offload_folder: str | None = field(default=None, metadata={PATHS: {"": absolute}})
    offload_state_dict: bool = False
    strict: bool = True
    check_finite: bool = False
    verify: Literal["index", "headers", "full"] = "headers"

    @property
    def depth(self) -> Depth:
        """How deep the checkpoint is looked at to tell which it is."""
        return "index" if self.verify == "index" else "headers"


def faults(given: ShardLoadConfig, model: Mapping[str, Any]) -> Iterable[Fault]:
    """Yield what is wrong with the keys, and with the files of the config's ``model`` as far as ``verify`` looks."""
    yield from _check_checkpoint(model, given.depth)
    yield from _check_adapter(model)
    if given.offload_folder is not None:
        yield from _check_offload_folder(given.offload_folder, model)


def open_weights(model: Mapping[str, Any], *, depth: Depth = "headers") -> Checkpoint:
    """Open the checkpoint of the config's ``model``: to tell which it is, or to load it, with all its headers."""
    return open_checkpoint(weights_path(model), allow_links=bool(model.get("allow_links")), depth=depth)


def open_adapter_of(model: Mapping[str, Any]) -> Checkpoint | None:
    """Open the adapter of the config's ``model``, with its headers; null where none is given."""
    folder = adapter_folder(model)
    return None if folder is None else open_adapter(folder, allow_links=bool(model.get("allow_links")))


def _check_adapter(model: Mapping[str, Any]) -> Iterable[Fault]:
    folder = adapter_folder(model)
    if folder is None or not folder.is_dir():
        return  # which the model's own check says
    try:
        open_adapter_of(model)
    except (CheckpointError, StorageError) as error:
        yield Fault("model.adapter", str(error), type(error))


def _check_checkpoint(model: Mapping[str, Any], depth: Depth) -> Iterable[Fault]:
    path = model.get("path")
    if not isinstance(path, str) or not path:
        yield Fault("model.path", f"{path!r}: the weights' folder or file belongs here", CheckpointError)
        return
    if is_hub_id(path) and local_snapshot(model, weights=True) is None:
        reason = fault_offline(model, weights=True)
        if reason:
            yield Fault("model.path", reason, CheckpointError)
        return  # fetched when the inputs are gathered, once the whole config is known to be sound
    try:
        open_weights(model, depth=depth)
    except (CheckpointError, StorageError) as error:
        yield Fault("model.path", str(error), type(error))


def _check_offload_folder(given: str, model: Mapping[str, Any]) -> Iterable[Fault]:
    if not given:
        yield Fault("offload_folder", "'' is no path of a folder; give one, or null for the cache")
        return
    folder, path = Path(given), Path(str(model.get("path")))  # a Hub's cache is nobody's offload folder
    own = path if path.is_dir() else path.parent
    if folder.exists() and not folder.is_dir():
        yield Fault("offload_folder", f"{given!r} is a file; give a folder, or null for the cache")
    elif folder.exists() and own.exists() and folder.samefile(own):
        yield Fault("offload_folder", f"{given!r} is the checkpoint's own folder; give another, or null for the cache")
