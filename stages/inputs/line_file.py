"""Files of one text a line, or of one JSON value: what a stage is asked, where it is more than a command line holds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offstage.pipeline.errors import ConfigError
from offstage.pipeline.regular_files import SIGN, as_lines, parse_json, read_regular

_JSON_LINES = (".jsonl", ".ndjson")
_MOST_DEPTH = 50
"""More than what is asked for is nested, and little enough to have room in what keys and records hold it in."""


_STREAM = f"{SIGN} for standard input"


@dataclass(frozen=True, slots=True)
class LineFile:
    """What the config's ``key`` names: a file with one ``noun`` a line, which may be of the ``kinds`` that are told.

    Where it ``streams``, it may be standard input too.
    """

    key: str
    noun: str
    kinds: str
    streams: bool = True

    def read(self, file: object, streamed: object = None) -> dict[str, Any]:
        """Return the text of each line of ``file``, or its JSON value, by where it stands; blank lines are passed over.

        ``streamed`` are the lines of standard input, where ``file`` is ``-``. Raises ``ConfigError`` for what is no
        such file.
        """
        if file == SIGN and self.streams:
            lines = list(map(str, streamed)) if isinstance(streamed, list) else []
            return self._values("standard input", lines, is_json=_are_json(lines))
        path = Path(str(file))
        if not path.is_file():
            kinds = f"a text file with one {self.noun} a line", "a .jsonl one", *([_STREAM] if self.streams else ())
            raise ConfigError(f"{self.key}: {str(file)!r} is no file; give {', '.join(kinds[:-1])}, or {kinds[-1]}")
        try:
            lines = as_lines(read_regular(path))
        except OSError as error:
            raise ConfigError(f"{self.key}: {str(file)!r} can't be read: {error.strerror or error}") from error
        return self._values(repr(str(file)), lines, is_json=path.suffix in _JSON_LINES)

    def _values(self, origin: str, lines: Sequence[str], *, is_json: bool) -> dict[str, Any]:
        """Return what is in ``lines``, each JSON or text, of what ``origin`` names."""
        values: dict[str, Any] = {}
        for number, text in enumerate(lines, start=1):
            name = f"{self.key} line {number}"
            try:
                text.encode()
            except UnicodeEncodeError as error:
                place = f"from its character {error.start + 1} on"
                raise ConfigError(f"{name}: {origin} isn't UTF-8 there, {place}; save it as UTF-8") from error
            if text.strip():
                values[name] = self._parsed(name, text) if is_json else text
        if not values:
            raise ConfigError(f"{self.key}: {origin} holds no {self.noun}; write one a line")
        return values

    def _parsed(self, name: str, line: str) -> Any:
        try:
            return parse_json(line.encode(), depth=_MOST_DEPTH)
        except ValueError as error:
            raise ConfigError(f"{name}: {line[:80]!r} is no JSON ({error}); {self.kinds}") from error


def is_text(value: Any) -> bool:
    """Return whether ``value`` is text that UTF-8 has: what came from other bytes holds halves of characters."""
    if not isinstance(value, str) or not value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _are_json(lines: Iterable[str]) -> bool:
    """Return whether ``lines``, which no file's name says anything of, are JSON: the first with anything on it tells.

    It begins as an object or a list does, or is a string in quotes and nothing else. All lines are read one way: a
    broken one among JSON is an error and no text, and text that isn't the first may begin with a brace.
    """
    first = next((line.strip() for line in lines if line.strip()), "")
    if not first.startswith('"'):
        return first.startswith(("{", "["))
    with suppress(ValueError):
        return isinstance(json.loads(first), str)
    return False
