"""A GGUF file as a checkpoint: one file that says all of a model, in llama.cpp's words.

transformers reads a config and a tokenizer from such a file. What it makes of them is kept in a folder as
``save_pretrained`` writes it, with the names of the tensors beside: so everything that knows checkpoint folders knows
GGUF files, and a run that is served from the cache needs neither torch nor transformers. Weights stay in the file.
The folder is an artifact of the user's cache: one that isn't as it was written is made again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from offstage.pipeline.atomic_files import write_text
from offstage.pipeline.cache import user_cache
from offstage.pipeline.cache.store import Store
from offstage.pipeline.errors import CheckpointError, ConfigError, errors_alone, foreign
from offstage.pipeline.regular_files import read_regular
from offstage.stages.checkpoints.bounds import bounded
from offstage.stages.checkpoints.gguf_header import GgufHeader, read_gguf_header

NAMES = "gguf_tensors.json"
"""The file of the folder that says which of the file's tensors each of the model's is made of."""

FOLDER = "gguf"
_VERSION = 2
"""Raised when a folder that was made before says something else than one that is made now."""
_OPTIONS = "generation_config.json"
_AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM")
_verified: set[Path] = set()
"""The folders that this process has found whole: they are asked for often."""
_log = logging.getLogger("offstage")


def gguf_folder(path: Path) -> Path:
    """Return the folder that says of the GGUF file ``path`` what a checkpoint's folder says beside the weights.

    It is made where it isn't there yet, in the user's cache. A ``CheckpointError`` where the file is damaged or no
    model that is served; a ``ConfigError`` where the ``gguf`` package isn't installed.
    """
    if find_spec("gguf") is None:
        raise ConfigError(
            f"model.path: {str(path)!r} is read with the package gguf, which isn't installed; "
            "pip install 'offstage-pipeline[gguf]'"
        )
    header = read_gguf_header(path)
    options = path.parent / _OPTIONS
    beside = read_regular(options) if options.is_file() else b""
    versions = [metadata.version(name) for name in ("transformers", "gguf")]
    parts = [_VERSION, header.file.digest, *versions, hashlib.sha256(beside).hexdigest()]
    root, key = user_cache(), hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    folder = root / FOLDER / key
    if folder not in _verified or not (folder / NAMES).is_file():
        store = Store(root, model=str(path))
        store.obtain(FOLDER, key, partial(_describe, header, beside))
        store.sweep()
        _verified.add(folder)
    return folder


def _describe(header: GgufHeader, options: bytes, folder: Path) -> None:
    """Write to ``folder`` what transformers reads of the file (the config, the tokenizer, the names of tensors), and
    the ``options`` that lie beside it.
    """
    import transformers

    from offstage.stages.checkpoints.gguf_names import name_gguf_tensors

    path = header.file.path
    _log.info("%s: transformers reads its config and its tokenizer, once; a large vocabulary takes a minute", path)
    with errors_alone(transformers.logging), foreign(CheckpointError, f"{path}: no model can be made of it"):
        keys = _read_keys(header)
        with bounded(str(path)):
            config, model = _empty_model(path, keys)
            named = name_gguf_tensors(header, keys, model)
        config.architectures, config.dtype = [type(model).__name__], "float32"  # as transformers loads it by default
        config.save_pretrained(folder)
    if header.has_tokenizer:
        _save_tokenizer(path, folder)
    write_text(folder / NAMES, json.dumps({name: asdict(tensor) for name, tensor in named.items()}))
    if options:
        (folder / _OPTIONS).write_bytes(options)


def _read_keys(header: GgufHeader) -> dict[str, Any]:
    """Return what transformers makes of the file's keys: the fields of a config.

    A ``CheckpointError`` for architectures that it loads by another way, in which it unpacks to the dtype in use.
    """
    from transformers.integrations.gguf.gguf_conversion_mapping import GGUF_ARCHS
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = header.file.path
    if header.architecture in GGUF_ARCHS:
        raise CheckpointError(
            f"{path}: files of the architecture {header.architecture!r} aren't served; give the model as safetensors"
        )
    return dict(load_gguf_checkpoint(str(path))["config"])


def _empty_model(path: Path, keys: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the config that the ``keys`` are, and its model without weights."""
    import torch
    import transformers

    config = transformers.CONFIG_MAPPING[keys["model_type"]].from_dict(dict(keys))
    mappings = [getattr(transformers, name)._model_mapping for name in _AUTO_CLASSES]
    model_class = next((mapping[type(config)] for mapping in mappings if type(config) in mapping), None)
    if model_class is None:
        raise CheckpointError(f"{path}: {keys['model_type']!r} is no model that generates text; give it as safetensors")
    with torch.device("meta"):
        return config, model_class(config)


def _save_tokenizer(path: Path, folder: Path) -> None:
    """Write the tokenizer's files, if transformers knows the kind; without them a run says that there is none."""
    from transformers import AutoTokenizer

    try:
        with foreign(CheckpointError, f"{path}: has a tokenizer that transformers can't read"):
            tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
            tokenizer.save_pretrained(folder)
    except CheckpointError as error:
        _log.warning("%s; set model.tokenizer to a folder that has one", error)
