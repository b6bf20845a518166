"""Reading files that somebody else may have put there: regular ones alone, and no more of one than memory is for.

A FIFO in a file's place would hold a run up for ever, a device never ends, and merely opening some devices does
something. What a run reads whole (configs, indexes, manifests, records, what the cache keeps) it reads by these
functions; what it reads in parts it opens by ``open_regular``.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from offstage.pipeline.errors import ConfigError, named

MAX_BYTES = 2**28
"""More than any file has that is read whole: the largest tokenizers have 40 MB, the largest indexes 20."""
MAX_DEPTH = 100
"""More than any JSON of a checkpoint, a record or a cache is nested, and less than trips what works on it."""


class NotRegularError(OSError):
    """What lies there is no regular file: a folder, a FIFO, a socket, a device."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EINVAL, "not a regular file", str(path))


def lies_in(path: str | Path, folders: Iterable[Path]) -> bool:
    """Return whether ``path`` leads into one of ``folders``, whatever links are on its way."""
    try:
        target = Path(path).resolve()
        return any(target.is_relative_to(folder.resolve()) for folder in folders)
    except (OSError, RuntimeError, ValueError):  # links in a circle, a name that no file can have
        return False


def open_regular(path: Path) -> int:
    """Open the regular file ``path`` for reading and return its descriptor.

    Raises:
        NotRegularError: something else lies there; it isn't opened.
        OSError: nothing does, or it can't be opened.
    """
    try:
        status = path.stat()
    except ValueError as error:  # a text that no path can be: half of a character, a zero byte
        raise OSError(errno.EINVAL, str(error), str(path)) from error
    _require_regular(path, status)
    # Without O_NONBLOCK, a FIFO put in the file's place after the check would block here for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _require_regular(path, os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _require_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise NotRegularError(path)


def read_regular(path: Path, *, most: int = MAX_BYTES) -> bytes:
    """Return what the regular file ``path`` holds; an ``OSError`` as of ``open_regular``, or if it has over ``most``
    bytes.
    """
    with named(path), os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        # Below /proc a file says that it has 0 bytes, and may have no end; some have nothing yet, which isn't bytes.
        data: Any = b"" if size > most else file.read() if size else file.read(most + 1)
        if max(size, len(data or b"")) > most:
            raise OSError(errno.EFBIG, f"larger than the {most} bytes that such a file may have", str(path))
        if not isinstance(data, bytes):
            raise OSError(errno.EAGAIN, "nothing to read in it now", str(path))
        return data


def read_json(path: Path, *, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Return what the JSON file ``path`` says; ``pairs`` makes something else than a dict of an object's members.

    Raises:
        OSError: as of ``read_regular``.
        ValueError: not JSON in UTF-8, or nested more than ``MAX_DEPTH`` deep.
    """
    return parse_json(read_regular(path), pairs=pairs)


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in ``path``; an empty one where there is none that can be read."""
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def parse_json(
    data: bytes, *, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None, depth: int = MAX_DEPTH
) -> Any:
    """Return what the JSON text ``data`` says, as ``read_json`` does; it may be nested ``depth`` deep."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=pairs)
    except RecursionError as error:
        raise ValueError(f"nested more than {depth} deep") from error
    level = [value]
    for _ in range(depth):
        level = [child for item in level for child in _children(item)]
        if not level:
            return value
    raise ValueError(f"nested more than {depth} deep")


def _children(value: Any) -> list[Any]:
    """Return what is in ``value`` and may have something in itself."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [item for item in inner if isinstance(item, dict | list)]


SIGN = "-"
"""What stands for it where a path is asked for."""


def read_lines(key: str) -> list[str]:
    """Return the lines of standard input, which ``key`` asks for, to its end.

    Raises a ``ConfigError`` where there is none, or more than a file may have that is read whole.
    """
    if sys.stdin is None or sys.stdin.closed:
        raise ConfigError(f"{key}: {SIGN!r} is standard input, and there is none; give a file")
    try:
        data = sys.stdin.buffer.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{key}: standard input can't be read: {error.strerror or error}; give a file") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{key}: standard input has more than {MAX_BYTES} bytes; give its lines in several runs")
    return as_lines(data)


def as_lines(data: bytes) -> list[str]:
    """Return the lines of ``data``. What isn't UTF-8 becomes halves of characters, which no text has.

    A record can hold those, and whoever uses the lines names the one that has any.
    """
    return [line.decode(errors="surrogateescape") for line in data.splitlines()]
