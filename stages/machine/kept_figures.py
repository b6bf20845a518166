"""What was measured of the machine, kept in a file: measured once, read ever after."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from pipeline.atomic_files import replace_file


def kept_or_measured(path: Path, wanted: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Return what ``path`` keeps, a JSON object; what it lacks of ``wanted`` (name → probe) is measured and kept too.

    A probe that returns null leaves nothing: it is asked again the next time. One process measures at a time: runs that
    start together must plan with the same figures.
    """
    kept = _read(path)
    if wanted.keys() <= kept.keys():
        return kept
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        kept = _read(path)
        fresh = {key: _measure(probe) for key, probe in wanted.items() if key not in kept}
        found = kept | {key: figure for key, figure in fresh.items() if figure is not None}
        if found != kept:
            replace_file(path, json.dumps(found) + "\n")
    return found


def _read(path: Path) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return kept


def _measure(probe: Callable[[], Any]) -> Any:
    """Return what ``probe`` measures; null where the machine refuses it: an accelerator without free memory, say.

    A torch that was built without accelerators says so by an ``AssertionError``.
    """
    try:
        return probe()
    except (OSError, RuntimeError, AssertionError):
        return None
