"""What is done to files of one JSON value a line: to the value of a line, and to the checksum that it may have."""

from __future__ import annotations

import json
import zlib
from random import Random

from tests.fuzz.mutations import BYTES, Mutations, json_value


def json_line(content: bytes, donor: bytes, chance: Random) -> bytes:
    """Change the JSON of one line; if it has a checksum it is often given the one of what stands there then."""
    lines, others = content.splitlines(keepends=True), donor.splitlines(keepends=True)
    if not lines or not others:
        return content
    at = chance.randrange(len(lines))
    changed = json_value(lines[at].strip(), chance.choice(others).strip(), chance)
    lines[at] = (_summed(changed) if chance.random() < 0.7 else changed) + b"\n"
    return b"".join(lines)


def deep_line(content: bytes, _donor: bytes, chance: Random) -> bytes:
    """Put in a line that is nested as deep as nothing is."""
    lines = content.splitlines(keepends=True)
    depth = chance.choice((51, 101, 1000, 100_000))
    deep = b"[" * depth + b"]" * depth if chance.random() < 0.5 else b'{"a":' * depth + b"1" + b"}" * depth
    lines.insert(chance.randrange(len(lines) + 1), deep + b"\n")
    return b"".join(lines)


def _summed(line: bytes) -> bytes:
    """Return ``line`` with the checksum that a row of kept results has, where it is one."""
    try:
        row = json.loads(line)
        if not isinstance(row, dict) or "crc32" not in row:
            return line
        row.pop("crc32")
        return json.dumps({**row, "crc32": zlib.crc32(json.dumps(row).encode())}).encode()
    except (ValueError, RecursionError):
        return line


LINES: Mutations = (*[json_line] * 12, deep_line, *BYTES)
