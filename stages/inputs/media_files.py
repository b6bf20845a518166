"""What files of images and of audio have in common: they are read whole, within bounds, by libraries that may lack.

A result depends on a file's content and not on its name alone: the content's hash is taken as the file is found, and
what is read later must still have it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from offstage.pipeline.errors import ConfigError
from offstage.pipeline.regular_files import read_regular
from offstage.pipeline.typed_config import expanded

MediaKind = Literal["image", "audio"]
KINDS: tuple[MediaKind, ...] = ("image", "audio")

_REMEMBERED = 2**16
"""Of how many files the hash is remembered: what is asked is read several times in a run."""


_LIBRARIES = {"pillow": "PIL", "torchvision": "torchvision", "soundfile": "soundfile"}


@dataclass(frozen=True, slots=True)
class MediaFile:
    """A file of one ``kind``: its absolute ``path``, and the SHA-256 of its content in hex."""

    kind: MediaKind
    path: str
    sha256: str


def find_media(key: str, kind: MediaKind, given: object, folder: Path) -> MediaFile:
    """Return the file that ``given`` names, from ``folder``; a ``ConfigError`` that begins with ``key`` if none is."""
    if not isinstance(given, str) or not given:
        raise ConfigError(f"{key}: {given!r} is no path; give that of a file")
    try:
        path = folder.joinpath(expanded(given)).absolute()
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{key}: {str(path)!r} can't be read: {reason}") from error
    return MediaFile(kind, str(path), _hash(key, path, (status.st_dev, status.st_ino, status.st_mtime_ns)))


@lru_cache(_REMEMBERED)
def _hash(key: str, path: Path, _identity: tuple[int, ...]) -> str:
    return hashlib.sha256(read_media(key, path)).hexdigest()


def read_media(key: str, file: Path, *, sha256: str | None = None) -> bytes:
    """Return what ``file`` holds; a ``ConfigError`` that begins with ``key`` where it can't be read, or is empty.

    So it is where ``sha256`` is given and the content has another: it was changed since it was found.
    """
    try:
        data = read_regular(file)
    except OSError as error:
        raise ConfigError(f"{key}: {str(file)!r} can't be read: {error.strerror or error}") from error
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        raise ConfigError(f"{key}: {str(file)!r} has changed since the run began; run it again")
    if not data:
        raise ConfigError(f"{key}: {str(file)!r} is an empty file; give one with something in it")
    return data


def require(key: str, package: str, reason: str) -> None:
    """Raise a ``ConfigError`` that begins with ``key`` and names the extra to install unless ``package`` is there."""
    if find_spec(package) is None:
        raise ConfigError(f"{key}: {reason}, which isn't installed; pip install 'offstage-pipeline[media]'")


def media_libraries() -> dict[str, str | None]:
    """Return the versions of the libraries that decode and resize, null for one that isn't here.

    Another version may give other numbers.
    """
    return {name: metadata.version(name) if find_spec(module) else None for name, module in _LIBRARIES.items()}
