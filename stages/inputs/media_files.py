"""What files of images and of audio have in common: they are read whole, within bounds, by libraries that may lack."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from pipeline.errors import ConfigError
from pipeline.regular_files import read_regular


def read_media(key: str, file: Path) -> bytes:
    """Return what ``file`` holds; a ``ConfigError`` that begins with ``key`` where it can't be read, or is empty."""
    try:
        data = read_regular(file)
    except OSError as error:
        raise ConfigError(f"{key}: {str(file)!r} can't be read: {error.strerror or error}") from error
    if not data:
        raise ConfigError(f"{key}: {str(file)!r} is an empty file; give one with something in it")
    return data


def require(key: str, package: str, reason: str) -> None:
    """Raise a ``ConfigError`` that begins with ``key`` and names the extra to install unless ``package`` is there."""
    if find_spec(package) is None:
        raise ConfigError(f"{key}: {reason}, which isn't installed; pip install 'offstage-pipeline[media]'")
