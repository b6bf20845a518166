"""What a checkpoint says of how it is to generate: beams, sampling, the tokens that end an answer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import CheckpointError, foreign

if TYPE_CHECKING:
    from transformers import GenerationConfig

GENERATION_CONFIG = "generation_config.json"


def read_generation_config(folder: Path) -> GenerationConfig | None:
    """Return what the checkpoint's ``generation_config.json`` says, or null if it has none.

    A ``CheckpointError`` names the file where transformers can't make anything of it.
    """
    from transformers import GenerationConfig

    if not folder.joinpath(GENERATION_CONFIG).is_file():
        return None
    with foreign(CheckpointError, f"{folder / GENERATION_CONFIG}", advice="; mend or remove the file"):
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
