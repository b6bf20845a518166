"""What a model is, as far as it can be told without importing its code.

These values go into keys: a run that is served from the cache must be able to compute them in milliseconds, so
nothing here imports torch, transformers or the user's module.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from pipeline.errors import CheckpointError
from stages.checkpoints.hub import checkpoint_folder, weights_path
from stages.checkpoints.safetensors_header import read_header
from stages.checkpoints.weight_files import weight_files

OWN_KEYS = ("kind", "path", "revision", "no_split", "tokenizer", "trust_remote_code", "allow_links")
"""The keys of ``model`` that are ours; for ``model=module`` all others are arguments of its constructor."""

_DTYPES = ("float32", "float16", "bfloat16", "float64")
"""What a model may be in; a checkpoint's first tensor of one of them tells which."""

WHERE_CODE_IS_FOUND = "give PACKAGE.MODULE.CLASS, with the package installed, on PYTHONPATH or in the current folder"


def identity(model: Mapping[str, Any]) -> dict[str, object]:
    """Return what the model's structure depends on, for the node ``model`` of a config.

    A pretrained model is its config's bytes, its class, the version of transformers and, where its own code is
    trusted, that code; a module is its target, its arguments and the code that the target lies in.
    """
    if model["kind"] == "module":
        arguments = constructor_arguments(model)
        code = code_identity(str(arguments["_target_"]))
        return {"kind": "module", "arguments": arguments, "no_split": model["no_split"], "code": code}
    folder = checkpoint_folder(model)
    trusted = sorted(folder.glob("*.py")) if model["trust_remote_code"] else []
    return {
        "kind": "pretrained",
        "config": read_config_bytes(folder),
        "class": model.get("class"),
        "no_split": model.get("no_split"),
        "transformers": metadata.version("transformers"),
        "code": {file.name: file.read_bytes() for file in trusted},
    }


def constructor_arguments(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``_target_`` and the constructor arguments of ``model=module``: every key that isn't ours."""
    return {str(key): value for key, value in model.items() if key not in OWN_KEYS}


def read_config_bytes(folder: Path) -> bytes:
    """Return the bytes of a checkpoint folder's ``config.json``; a ``CheckpointError`` if there is none."""
    try:
        return folder.joinpath("config.json").read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"model.path: {str(folder)!r} has no readable config.json ({error.strerror}); "
            "give a checkpoint folder as save_pretrained writes it"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """Return what a checkpoint folder's ``config.json`` says; a ``CheckpointError`` if it isn't a JSON object."""
    try:
        parsed = json.loads(read_config_bytes(folder))
    except ValueError as error:
        raise CheckpointError(f"{folder / 'config.json'}: not JSON ({error}); restore the file") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{folder / 'config.json'}: holds {type(parsed).__name__}, not a JSON object")
    return parsed


def resolve_dtype(config: Mapping[str, Any]) -> str:
    """Return the dtype that the config's ``dtype`` stands for.

    ``auto`` is what a checkpoint's ``config.json`` declares, else the dtype of the first floating tensor of its first
    safetensors file, else float32. For ``model=module`` it stays ``auto``: whatever the constructor makes.
    """
    dtype, model = str(config["dtype"]), config["model"]
    if dtype != "auto" or model["kind"] == "module":
        return dtype
    declared = _declared_dtype(read_config(checkpoint_folder(model))) or _stored_dtype(model) or "float32"
    return declared.removeprefix("torch.")


def _declared_dtype(config: Mapping[str, Any]) -> str | None:
    nested = config.get("text_config")
    places = [config, nested if isinstance(nested, Mapping) else {}]
    found = [place.get(key) for place in places for key in ("dtype", "torch_dtype")]
    return next((value for value in found if isinstance(value, str) and value != "auto"), None)


def _stored_dtype(model: Mapping[str, Any]) -> str | None:
    for file in weight_files(weights_path(model))[:1]:
        if file.suffix != ".safetensors":
            return None
        try:
            _, entries = read_header(file)
        except CheckpointError:
            return None  # shard_load refuses the file by name
        return next((entry.dtype for entry in entries.values() if entry.dtype in _DTYPES), None)
    return None


def code_identity(target: str) -> dict[str, str]:
    """Return what the code behind a dotted ``target`` is, without importing it.

    For a package that an installed distribution provides, its version; else the hash of every source file of the
    top-level module or package that ``target`` names. Empty if there is no such module.
    """
    top = target.partition(".")[0]
    distributions = metadata.packages_distributions().get(top, [])
    if distributions:
        return {name: metadata.version(name) for name in sorted(set(distributions))}
    spec = PathFinder.find_spec(top, [*sys.path, str(Path.cwd())])
    if spec is None:
        return {}
    places = spec.submodule_search_locations or ([spec.origin] if spec.origin else [])
    files = [file for place in places for file in _sources(Path(place))]
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _sources(place: Path) -> list[Path]:
    return sorted(place.rglob("*.py")) if place.is_dir() else [place]
