"""Images from files: decoded within bounds, upright, in RGB, as transformers' processors take them."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from offstage.pipeline.errors import ConfigError, foreign
from offstage.stages.inputs.media_files import read_media, require

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""What is decoded: formats of pixels. Pillow would hand some others to programs beside it."""


def check_image(key: str, file: Path) -> None:
    """Raise a ``ConfigError`` that begins with ``key`` unless ``file`` begins as an image does; nothing is decoded."""
    with _decoding(key, file):
        _opened(key, file)


def read_image(key: str, file: Path, *, sha256: str | None = None) -> Image:
    """Return the image in ``file``; a ``ConfigError`` that begins with ``key`` where it is none, or one too large.

    The limit of pixels is Pillow's own (``MAX_IMAGE_PIXELS``), an error here and no warning. Of a file with several
    images, the first counts. ``sha256`` is the hash that its content must have.
    """
    from PIL.ImageOps import exif_transpose

    with _decoding(key, file):
        return exif_transpose(_opened(key, file, sha256)).convert("RGB")


def _opened(key: str, file: Path, sha256: str | None = None) -> Image:
    from PIL import Image, UnidentifiedImageError

    data = read_media(key, file, sha256=sha256)
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            return Image.open(BytesIO(data), formats=FORMATS)
        except UnidentifiedImageError as error:
            raise ConfigError(
                f"{key}: {str(file)!r} is no image that can be read; give one of {', '.join(FORMATS)}"
            ) from error


def _decoding(key: str, file: Path) -> AbstractContextManager[None]:
    require(key, "PIL", "reading images needs Pillow")
    formats = ", ".join(FORMATS)
    return foreign(ConfigError, f"{key}: {str(file)!r} is no image that can be read", advice=f"; give one of {formats}")
