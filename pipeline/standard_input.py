"""Standard input, where a key of the config names it in place of a file, and the lines of either."""

from __future__ import annotations

import sys

from offstage.pipeline.errors import ConfigError
from offstage.pipeline.regular_files import MAX_BYTES

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
