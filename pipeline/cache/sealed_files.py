"""The small files of the cache that grow: JSON with its own hash beside it, in one file, written whole.

An artifact never changes, and its manifest says what it was. What is measured of a machine is added to, by several
processes, so the file itself says whether it is as it was written. So does each line of a file that grows by lines.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offstage.pipeline.atomic_files import replace_file
from offstage.pipeline.cache.leftovers import move_aside
from offstage.pipeline.cache.manifest import DamagedError
from offstage.pipeline.regular_files import NotRegularError, parse_json, read_json


def write_sealed(path: Path, content: Any) -> None:
    """Write ``content``, plain JSON data, to ``path``, over what was there."""
    replace_file(path, json.dumps({"sha256": _digest(content), "content": content}, indent=1) + "\n")


def read_sealed(path: Path) -> Any:
    """Return what was written to ``path``; None where nothing was.

    Raises:
        DamagedError: what lies there isn't what was written.
        OSError: it can't be read.
    """
    try:
        document = read_json(path)
    except FileNotFoundError:
        return None
    except NotRegularError as error:
        raise DamagedError("isn't a file") from error
    except ValueError as error:
        raise DamagedError("isn't JSON") from error
    match document:
        case {"sha256": str(digest), "content": content} if digest == _digest(content):
            return content
    raise DamagedError("doesn't match its hash")


def settle_sealed(path: Path) -> Any:
    """Return what was written to ``path``, as ``read_sealed`` does; what is damaged is set aside, and None returned."""
    try:
        return read_sealed(path)
    except DamagedError as damage:
        move_aside(path, damage)
        return None


def sealed_line(row: Mapping[str, Any]) -> bytes:
    """Return ``row``, plain JSON data, as a line with a checksum of its own in the end."""
    return json.dumps({**row, "crc32": _sum(row)}).encode() + b"\n"


def read_sealed_line(line: bytes) -> dict[str, Any]:
    """Return the row that ``sealed_line`` made ``line`` of; a ``DamagedError`` where it isn't that, to its end."""
    try:
        row = parse_json(line) if line.endswith(b"\n") else None
    except ValueError as error:
        raise DamagedError("isn't JSON") from error
    if not isinstance(row, dict) or row.pop("crc32", None) != _sum(row):
        raise DamagedError("doesn't match its checksum")
    return row


def _sum(row: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(row).encode())


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
