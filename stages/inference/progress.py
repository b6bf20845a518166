"""Results as they finish: a file that grows by a line for each, so that a run that was killed goes on where it was.

Each line is the JSON of one result, with a checksum of its own in the end: what a kill cut short, or a disk changed, is
worked out again. A batch is written in one piece, and counts only where all of its lines are there.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from offstage.pipeline.atomic_files import write_whole
from offstage.pipeline.cache.sealed_files import DamagedError, read_sealed_line, sealed_line
from offstage.pipeline.errors import ConfigError, named
from offstage.pipeline.regular_files import read_regular

_ASKED = "asked"
_log = logging.getLogger("offstage")

Row = Mapping[str, Any]
"""A result: the ``index`` of what it is of, the number of its ``batch``, how many ``rows`` that has, and the rest."""


class Progress:
    """The results in ``file``, which is made where it isn't there; ``done`` has the whole batches by number.

    Without a file they are in memory alone. One that a user names (``asked`` then stands for what is asked) may be of
    something else: a ``ConfigError`` says so, and it is left as it is.
    """

    def __init__(self, file: Path | None = None, *, asked: str | None = None) -> None:
        self._file, self._asked = file, asked
        self.done: dict[int, list[Row]] = {}
        batches: dict[int, list[Row]] = defaultdict(list)
        lines = read_regular(file).splitlines(keepends=True) if file and file.exists() else []
        rows = _read_all(lines)
        if asked is not None and lines and {row.get(_ASKED) for row in rows} != {asked}:
            raise ConfigError(
                f"progress: {str(file)!r} doesn't hold answers to these prompts under these options by this model; "
                "give another file, or delete it"
            )
        for row in rows:
            batches[row["batch"]].append(row)
        self.done = {number: rows for number, rows in batches.items() if len(rows) == rows[0]["rows"]}
        self.earlier = len({row["index"] for rows in self.done.values() for row in rows})
        """How many results there were at the beginning, of a run that didn't come to its end."""
        if sum(map(len, self.done.values())) < len(lines):
            self._write([row for rows in self.done.values() for row in rows])

    @property
    def is_kept(self) -> bool:
        """Whether results are kept as they come."""
        return self._file is not None

    def add(self, rows: Sequence[Row]) -> None:
        """Append the ``rows`` of a batch, and have them on the disk."""
        rows = rows if self._asked is None else [{**row, _ASKED: self._asked} for row in rows]
        self.done[rows[0]["batch"]] = list(rows)
        if self._file is None:
            return
        with named(self._file), self._file.open("ab") as file:
            file.write(b"".join(map(sealed_line, rows)))
            file.flush()
            os.fsync(file.fileno())

    def keep(self, batches: Container[int]) -> None:
        """Forget all batches but these, in the file too."""
        forgotten = [number for number in self.done if number not in batches]
        for number in forgotten:
            del self.done[number]
        self.earlier = len({row["index"] for rows in self.done.values() for row in rows})
        if forgotten:
            self._write([row for rows in self.done.values() for row in rows])

    def settle(self) -> list[Row]:
        """Put all rows in the order of what they are of, in the file too, and return them."""
        rows = sorted((row for rows in self.done.values() for row in rows), key=lambda row: int(row["index"]))
        self._write(rows)
        return rows

    def _write(self, rows: Sequence[Row]) -> None:
        if self._file is not None:
            write_whole(self._file, b"".join(map(sealed_line, rows)))


def say_earlier(earlier: int, of: int, what: str) -> dict[str, int]:
    """Say in the log that a run goes on after so many ``of`` all its results; return that as a metric, if it does."""
    if not earlier:
        return {}
    _log.info("goes on after %d of %d %s, which a run before this one had come to", earlier, of, what)
    return {f"earlier_{what}": earlier}


def earlier_told(metrics: Mapping[str, Any], what: str) -> str:
    """Return what a stage's line on the screen says of ``say_earlier``; nothing where a run did all of it."""
    earlier = metrics.get(f"earlier_{what}")
    return f"; went on after {earlier} {what}, which the times aren't of" if earlier else ""


def read_rows(file: Path) -> list[Row]:
    """Return the results in ``file``, in the order in which they stand there."""
    return _read_all(read_regular(file).splitlines(keepends=True))


def _read_all(lines: Iterable[bytes]) -> list[Row]:
    return [row for row in map(_read, lines) if row is not None]


def _read(line: bytes) -> Row | None:
    """Return the row of a line, null where it isn't what was written, to its end."""
    try:
        row = read_sealed_line(line)
    except DamagedError:
        return None
    return row if all(type(row.get(name)) is int for name in ("index", "batch", "rows")) else None
