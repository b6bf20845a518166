"""Texts as token ids, and these held against the words that a model has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from offstage.pipeline.errors import ConfigError, foreign
from offstage.stages.inputs.prompts import MOST


def encode_text(name: str, text: str, tokenizer: Any, *, instead: str, special: bool = True) -> list[int]:
    """Return the token ids of ``text``, which stands at ``name``, as ``tokenizer`` makes them.

    They begin and end with the tokens that it puts around a text, unless it isn't to add ``special`` ones. Raises
    ``ConfigError`` where there is no tokenizer (``instead`` says how ids are given), and where it makes no tokens.
    """
    if tokenizer is None:
        raise ConfigError(
            f"{name}: {text!r} is text and the checkpoint has no tokenizer; "
            f"set model.tokenizer to a folder that has one, or give token ids: {instead}"
        )
    with foreign(ConfigError, f"{name}: {text!r} can't be made tokens by the tokenizer"):
        ids = [int(i) for i in tokenizer(text, add_special_tokens=special)["input_ids"]]
    if not ids:
        raise ConfigError(f"{name}: {text!r} has no tokens; give a longer text")
    return ids


def check_words(model: Any, encoded: Iterable[Sequence[int]], *, key: str) -> None:
    """Refuse token ids under ``key`` that the model has no embedding for, before its forward trips over them."""
    config: Any = getattr(model, "config", None)
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    words = getattr(text_config, "vocab_size", None) or MOST
    largest = max((max(ids) for ids in encoded if ids), default=0)
    if largest >= words:
        raise ConfigError(f"{key}: token id {largest} is beyond the model's {words} words; give ids below")
