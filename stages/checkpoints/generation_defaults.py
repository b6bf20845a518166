"""What a checkpoint says of how it is to generate: beams, sampling, the tokens that end an answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offstage.pipeline.errors import CheckpointError, foreign

if TYPE_CHECKING:
    from transformers import GenerationConfig

GENERATION_CONFIG = "generation_config.json"
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
        found = GenerationConfig.from_pretrained(folder, local_files_only=True)
    for name, value in vars(found).items():
        if name.endswith(TOKEN_OPTION) and named_tokens(value) is None:
            raise CheckpointError(f"{file}: {name}: {value!r} is no token id; give a whole number, or leave it out")
    return found


def named_tokens(value: object) -> list[int] | None:
    """Return the token ids that the ``value`` of an option names: none, one or a list; null where it names none."""
    found: Sequence[Any] = value if isinstance(value, list | tuple) else [] if value is None else [value]
    are_ids = all(isinstance(token, int) and not isinstance(token, bool) and abs(token) < 2**63 for token in found)
    return list(found) if are_ids else None
