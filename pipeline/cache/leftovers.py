"""What lies in a cache beside its artifacts, and who removes it: every run does, by age."""

from __future__ import annotations

import logging
import os
import shutil
import uuid
from contextlib import suppress
from pathlib import Path

from offstage.pipeline.atomic_files import TEMPORARY
from offstage.pipeline.cache.locks import LOCK, sole_use

BUILDING = TEMPORARY
"""An artifact that is being built or removed, or was when its process was killed."""
DAMAGED = ".damaged-"
"""An artifact that was set aside."""

_log = logging.getLogger("offstage")


def move_aside(path: Path, damage: object) -> None:
    """Rename what lies at ``path`` in the cache, which ``damage`` tells, so that it is made again; says so once.

    Raises ``OSError`` where the cache can't be written.
    """
    aside = path.with_name(f"{DAMAGED}{uuid.uuid4().hex}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return
    os.utime(aside, follow_symlinks=False)  # the sweep counts from now: a rename leaves the time as it was
    _log.warning("%s: %s; set aside as %s, to be built again", path, damage, aside.name)


def remove_leftovers(root: Path, *, unused_since: float) -> None:
    """Remove what nobody has touched since that time, in seconds of the epoch; what can't be seen or removed stays."""
    found: list[Path] = []
    with suppress(OSError):
        found = sorted(root.glob("*/.*"))
    for path in found:
        with suppress(OSError):
            if _is_leftover(path) and _newest(path) <= unused_since:
                _remove(path)


def _is_leftover(path: Path) -> bool:
    return path.name.startswith((BUILDING, DAMAGED)) or path.name.endswith(LOCK)


def _newest(path: Path) -> float:
    return max(each.lstat().st_mtime for each in (path, *path.rglob("*")))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    elif path.name.endswith(LOCK):
        with sole_use(path):  # it is gone then; one that is held stays
            pass
    else:
        path.unlink()
