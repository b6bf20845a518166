"""An adapter on disk: a folder as peft's ``save_pretrained`` writes it, and how much of what it may say is served.

Needs neither torch nor peft, so that a run that is served from the cache can tell in milliseconds whether the adapter
is the one that it knows. Adapters are small: their bytes go into keys, so that a copy elsewhere is the same one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offstage.pipeline.errors import CheckpointError
from offstage.pipeline.regular_files import read_object, read_regular
from offstage.stages.checkpoints.checkpoint import Checkpoint, open_checkpoint
from offstage.stages.checkpoints.config_files import parse_config
from offstage.stages.checkpoints.shard_files import locate

CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_FOLDER = "give a folder as peft's save_pretrained writes it"
_TYPE = "LORA"
_MOST_RANK = 2**16
"""Larger than any rank: an adapter of a rank near its model's width has more weights than what it adapts."""

ADAPTER = "default"
"""What peft calls the one adapter of a model."""

_ADDED = re.compile(rf"\.(lora_\w+|modules_to_save)\.{ADAPTER}(\.|$)")
"""What the name of a tensor has in a model that an adapter adds to it."""

_SERVED = {
    "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "fan_in_fan_out", "bias", "use_rslora",
    "use_dora", "lora_bias", "modules_to_save", "layers_to_transform", "layers_pattern", "rank_pattern",
    "alpha_pattern",
}  # fmt: skip
"""What of peft's ``LoraConfig`` is handed on to peft."""

_OF_TRAINING = {
    "peft_type", "peft_version", "task_type", "inference_mode", "auto_mapping", "base_model_name_or_path", "revision",
    "megatron_core", "qalora_group_size", "corda_config", "eva_config", "loftq_config", "init_lora_weights",
}  # fmt: skip
"""What says nothing of how a trained adapter computes, whatever stands there."""

_STARTS = (True, False, None, "gaussian", "eva")
"""How weights may have been initialised: all other ways take something out of the base model's weights too."""


def is_added(name: str) -> bool:
    """Return whether an adapter adds the tensor ``name`` to a model."""
    return _ADDED.search(name) is not None


def adapter_folder(model: Mapping[str, Any]) -> Path | None:
    """Return the folder of the config's ``model.adapter``; null where none is given."""
    given = model.get("adapter")
    return Path(str(given)) if given else None


def read_settings(folder: Path) -> dict[str, Any]:
    """Return what the adapter in ``folder`` says of how it computes: arguments of peft's ``LoraConfig``.

    A ``CheckpointError`` names what is missing, damaged, or another kind of adapter than those that are served.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{str(folder)!r} is no folder; {_FOLDER}")
    path = folder / CONFIG
    config = parse_config(path, _read_config(folder))
    kind = config.get("peft_type")
    if kind != _TYPE:
        raise CheckpointError(f"{path}: peft_type {str(kind)[:40]!r} isn't served; the one that is: {_TYPE}")
    start = config.get("init_lora_weights")
    if start not in _STARTS:
        raise CheckpointError(
            f"{path}: init_lora_weights {str(start)[:40]!r} changes the model's own weights, which isn't served; "
            "save the adapter with path_initial_model_for_weight_conversion"
        )
    for name, value in config.items():
        if value and name not in _SERVED | _OF_TRAINING:
            raise CheckpointError(f"{path}: {name[:40]}: {str(value)[:40]!r} isn't served; merge the adapter with peft")
    _check_ranks(path, config)
    return {name: config[name] for name in sorted(_SERVED & config.keys())}


def told_model(folder: Path) -> str | None:
    """Return the name of the model that the adapter in ``folder`` says it is for: a folder or an id of somebody's."""
    name = read_object(folder / CONFIG).get("base_model_name_or_path")
    return name if isinstance(name, str) else None


def _read_config(folder: Path) -> bytes:
    try:
        return read_regular(folder / CONFIG)
    except OSError as error:
        raise CheckpointError(f"{str(folder)!r} has no readable {CONFIG} ({error.strerror}); {_FOLDER}") from error


def _check_ranks(path: Path, config: Mapping[str, Any]) -> None:
    pattern = config.get("rank_pattern") or {}
    for rank in [config.get("r", 8), *(pattern.values() if isinstance(pattern, dict) else [pattern])]:
        if type(rank) is not int or not 0 < rank <= _MOST_RANK:
            raise CheckpointError(f"{path}: {str(rank)[:40]!r} is no rank of an adapter; restore the file")


def open_adapter(folder: Path, *, allow_links: bool = False) -> Checkpoint:
    """Return the weights of the adapter in ``folder`` as a checkpoint: headers checked, no data read."""
    name = next((name for name in _WEIGHTS if folder.joinpath(name).exists()), None)
    if name is None:
        raise CheckpointError(f"{folder}: no adapter's weights here (looked for {', '.join(_WEIGHTS)}); {_FOLDER}")
    return open_checkpoint(locate(folder, name, allow_links=allow_links))


def settings_identity(folder: Path) -> str:
    """Return the SHA-256 of what the adapter in ``folder`` says of itself."""
    return hashlib.sha256(_read_config(folder)).hexdigest()
