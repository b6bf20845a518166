"""The libraries that decode images and sounds and make them a model's size: another version may give other numbers."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec

_LIBRARIES = {"pillow": "PIL", "torchvision": "torchvision", "soundfile": "soundfile"}


def media_libraries() -> dict[str, str | None]:
    """Return the versions of the libraries that decode and resize, null for one that isn't here."""
    return {name: metadata.version(name) if find_spec(module) else None for name, module in _LIBRARIES.items()}
