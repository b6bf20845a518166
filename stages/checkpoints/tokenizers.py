"""The tokenizer of a checkpoint: which of its files it is made from, and loading it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offstage.pipeline.errors import CheckpointError, ConfigError, errors_alone, foreign
from offstage.pipeline.plain_data import walk
from offstage.pipeline.regular_files import read_object
from offstage.stages.checkpoints.model_source import ModelSource
from offstage.stages.checkpoints.shard_files import TOKENIZER_FILES

FILE_NAME = "tokenizer.json"
MOST = 10**5
"""Bytes out for each byte in, each step at its worst: real tokenizers come to some hundreds."""
_STEPS: Mapping[str, int] = {"ByteLevel": 2, "Metaspace": 4, "Precompiled": 32}
_DATA = ("model", "added_tokens")


def check_tokenizer(folder: Path) -> None:
    """Raise a ``CheckpointError`` where the tokenizer in ``folder`` can make a text longer beyond measure.

    Forty normalizers that each double their input make a terabyte of one letter, in native code that nothing
    interrupts; the added tokens go through them as soon as the file is loaded. So that is read from its
    ``tokenizer.json`` before anything runs it; one that can't be read at all is for the library to report.
    """
    path = folder / FILE_NAME
    growth = 1.0
    for _, part in walk({key: value for key, value in read_object(path).items() if key not in _DATA}):
        growth *= _growth(part) if isinstance(part, dict) else 1
        if growth > MOST:
            raise CheckpointError(
                f"{path}: its steps make a text more than {MOST} times longer; no real tokenizer does"
            )


def _growth(step: Mapping[str, Any]) -> float:
    """Return how many times longer ``step`` can make a text, at least 1."""
    kind = step.get("type")
    if kind == "Prepend":
        return 1 + _length(step.get("prepend"))
    if kind != "Replace":
        return _STEPS.get(kind, 1) if isinstance(kind, str) else 1
    pattern, length = step.get("pattern"), _length(step.get("content"))
    plain = _length(pattern.get("String")) if isinstance(pattern, dict) else 0
    return max(1, length / plain) if plain else 1 + length  # what has no length may match between any two letters


def _length(text: object) -> int:
    return len(text.encode(errors="surrogatepass")) if isinstance(text, str) else 0


def load_tokenizer(source: ModelSource) -> Any:
    """Return the tokenizer of ``source``, or None if its folder holds none.

    What ``model.tokenizer`` names must hold one.
    """
    from transformers import AutoTokenizer, logging

    folder = source.text_folder
    if not source.tokenizer and not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        return None
    check_tokenizer(folder)
    advice = "; set model.tokenizer to a folder that has one that loads, or give token ids: generate.prompts=[[5,6,7]]"
    about = f"model.tokenizer: {str(folder)!r} holds no tokenizer that loads"
    with errors_alone(logging), foreign(ConfigError, about, advice=advice):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=source.trust_remote_code, local_files_only=True)
