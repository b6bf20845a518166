"""The tokenizer of a checkpoint: which of its files it is made from, and loading it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.errors import ConfigError, foreign
from stages.checkpoints.hub import checkpoint_folder, tokenizer_folder
from stages.checkpoints.tokenizer_limits import check_tokenizer

TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model")
"""The files of a checkpoint folder that show that it has a tokenizer, as glob patterns."""

TEXT_FILES = ("*.json", "*.jinja", "*.txt", "*.tiktoken", "*.spm", "*.codes")
"""All other files that one tokenizer or another is made from, or that say what the default options are."""


def load_tokenizer(model: Mapping[str, Any]) -> Any:
    """Return the tokenizer of the config node ``model``, or None if its folder holds none.

    What ``model.tokenizer`` names must hold one.
    """
    from transformers import AutoTokenizer

    folder = tokenizer_folder(model) or checkpoint_folder(model)
    if not model.get("tokenizer") and not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        return None
    check_tokenizer(folder)
    remote = bool(model.get("trust_remote_code", False))
    advice = "; set model.tokenizer to a folder that has one that loads, or give token ids: generate.prompts=[[5,6,7]]"
    with foreign(ConfigError, f"model.tokenizer: {str(folder)!r} holds no tokenizer that loads", advice=advice):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=remote, local_files_only=True)
