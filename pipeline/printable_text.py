"""Text that whoever wrote it can't have a terminal obey: a prompt, and what a model says, may hold anything."""

from __future__ import annotations

import re
from typing import Any

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Return ``text`` with control characters, text direction overrides and lone surrogates made visible.

    Carriage returns are left out: before the end of a line they mean nothing, elsewhere they would write over it. Each
    character is looked at by itself, so that text may be given piece by piece.
    """
    return _CONTROLS.sub("\ufffd", text.replace("\r", ""))


def printable_data(value: Any) -> Any:
    """Return plain data with all text in it ``printable``. Most of a record is numbers, and nothing else is as long."""
    if isinstance(value, str):
        return value if value.isascii() and value.isprintable() else printable(value)
    if isinstance(value, list):
        return value if set(map(type, value)) <= {int, float} else [printable_data(entry) for entry in value]
    if isinstance(value, dict):
        return {printable_data(key): printable_data(entry) for key, entry in value.items()}
    return value
