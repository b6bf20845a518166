"""All formats by name, and the imports that their cases begin with."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from tests.fuzz import asked, caches, commands, packed, packed_commands, packed_libraries, records, texts, weights
from tests.fuzz.formats import Format
from tests.fuzz.workers import modules_of

ROOMS = (weights, packed, packed_libraries, texts, asked, caches, records, commands, packed_commands)
FORMATS = {kind.name: kind for room in ROOMS for kind in room.FORMATS}


def warm_up(chosen: Sequence[Format]) -> None:
    """Import what whole commands import, so that it needn't be imported once for each case."""
    if not any(kind.apart for kind in chosen):
        return
    with tempfile.TemporaryDirectory(prefix="offstage-fuzz-") as name:
        for module in modules_of(commands.FORMATS[0], Path(name)):
            import_module(module)
