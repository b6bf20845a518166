"""What a checkpoint's or an adapter's config file says, whatever somebody has put there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from offstage.pipeline.errors import CheckpointError
from offstage.pipeline.regular_files import parse_json


def parse_config(path: Path, content: bytes) -> dict[str, Any]:
    """Return the JSON object that ``content`` is, the bytes of the file ``path``; else a ``CheckpointError``."""
    try:
        parsed = parse_json(content)
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON ({error}); restore the file") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path}: holds {type(parsed).__name__}, not a JSON object; restore the file")
    return parsed
