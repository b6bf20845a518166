"""What a checkpoint says of how it is to generate: beams, sampling, the tokens that end an answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offstage.pipeline.errors import CheckpointError, foreign
from offstage.pipeline.regular_files import read_object

if TYPE_CHECKING:
    from transformers import GenerationConfig

GENERATION_CONFIG = "generation_config.json"
_IN_CONFIG = (
    "max_new_tokens", "use_cache", "cache_implementation", "cache_config", "guidance_scale", "prompt_lookup_num_tokens",
)  # fmt: skip
"""The options that change what decoding takes and that transformers takes from a ``config.json`` too."""
TOKEN_OPTION = "_token_id"
"""What the names of options end in that name tokens."""


def read_generation_config(folder: Path) -> GenerationConfig | None:
    """Return what the checkpoint's ``generation_config.json`` says, or null if it has none.

    A ``CheckpointError`` names the file where transformers can't make anything of it, or where it names no token that
    should: nothing in transformers looks at those early.
    """
    from transformers import GenerationConfig

    file = folder / GENERATION_CONFIG
    if not file.is_file():
        return None
    with foreign(CheckpointError, f"{file}", advice="; mend or remove the file"):
        config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    for name, value in vars(config).items():
        if name.endswith(TOKEN_OPTION) and named_tokens(value) is None:
            raise CheckpointError(f"{file}: {name}: {value!r} is no token id; give a whole number, or leave it out")
    return config


def generation_defaults(folder: Path) -> dict[str, Any]:
    """Return the options that the checkpoint in ``folder`` is decoded with where nobody says others, without nulls.

    They are as its files have them, since to have transformers read them takes seconds; what is wrong with them is
    said where a model is built. Where there is no ``generation_config.json`` its ``config.json`` may say some.
    """
    options = read_object(folder / GENERATION_CONFIG)
    if not options:
        config = read_object(folder / "config.json")
        options = {name: config[name] for name in _IN_CONFIG if name in config}
    return {name: value for name, value in options.items() if value is not None}


def named_tokens(value: object) -> list[int] | None:
    """Return the token ids that the ``value`` of an option names: none, one or a list; null where it names none."""
    tokens: Sequence[Any] = value if isinstance(value, list | tuple) else [] if value is None else [value]
    are_ids = all(isinstance(token, int) and not isinstance(token, bool) and abs(token) < 2**63 for token in tokens)
    return list(tokens) if are_ids else None
