"""Tuned weights as a checkpoint: in the format that they were loaded from, so that a run, or anybody, can load them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

from offstage.stages.checkpoints.adapters import ADAPTER, CONFIG, adapter_folder
from offstage.stages.checkpoints.model_source import ModelSource
from offstage.stages.checkpoints.shard_files import TOKENIZER_TEXTS
from offstage.stages.empty_init.adapted_model import without_adapter

SHARD_SIZE = "1GB"
"""The most of one file. A release of safetensors that copies what it writes copies no more than that at once."""

_BESIDE = (*TOKENIZER_TEXTS, "generation_config.json")
"""What goes along from the checkpoint's own folder: how text becomes tokens, and the default options."""

_PREFIX = "base_model.model."
"""What peft puts before the name of every tensor of an adapter."""


def save_model(model: Any, node: Mapping[str, Any], folder: Path) -> None:
    """Write ``model``, of the config's ``node``, to ``folder`` as transformers writes a checkpoint.

    Config and weights are the model's, the tokenizer's files and the default options those of its checkpoint: whether
    the options agree with each other is nothing that a training should fail on.
    """
    from transformers import GenerationConfig
    from transformers.utils import logging

    model.generation_config = GenerationConfig()
    logging.disable_progress_bar()
    model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
    logging.enable_progress_bar()
    (folder / "generation_config.json").unlink(missing_ok=True)
    source = ModelSource.of(node)
    for place in filter(None, (source.folder, source.tokenizer_folder)):
        for file in {file for pattern in _BESIDE for file in place.glob(pattern) if file.is_file()}:
            shutil.copyfile(file, folder / file.name)


def save_adapter(model: nn.Module, node: Mapping[str, Any], folder: Path) -> None:
    """Write the adapter of ``model`` to ``folder`` as peft writes one."""
    folder.mkdir(exist_ok=True)
    own = dict(model.named_parameters())
    weights = {
        f"{_PREFIX}{entry_name}": own[name].detach().to("cpu").contiguous()
        for entry_name, name in without_adapter(model).added.items()
    }
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    before = adapter_folder(node)
    if before is not None:
        shutil.copyfile(before / CONFIG, folder / CONFIG)
        return
    configs: Any = model.peft_config
    config = configs[ADAPTER]
    config.base_model_name_or_path, config.inference_mode = str(node["path"]), True
    config.save_pretrained(str(folder))
    written = json.loads((folder / CONFIG).read_text())
    if isinstance(written["target_modules"], list):  # a set that went through a list: in no order of its own
        (folder / CONFIG).write_text(
            json.dumps({**written, "target_modules": sorted(written["target_modules"])}, indent=2)
        )
