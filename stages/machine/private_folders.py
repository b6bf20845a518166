"""Folders that nobody else may change, as ssh asks of those of keys: for what is run, not only read.

Code that lies in a file is whatever that file is when it is loaded. So each folder on the way is opened in the one
before, without following a link, and must be this user's or root's, and closed to what others would write; one that is
sticky, as ``/tmp`` is, may be written to, since nobody exchanges there what isn't theirs.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_MODE = 0o700


def open_private(folder: Path) -> int:
    """Return a descriptor of ``folder``, an absolute path without links, to open by what lies in it.

    A ``PermissionError`` names the folder on the way that somebody else could exchange something in, and says what to
    do; any other ``OSError`` says that there is no such folder.
    """
    at = os.open("/", _flags())
    for place in [*reversed(folder.parents), folder]:
        try:
            inner = at if place == Path(place.anchor) else os.open(place.name, _flags(), dir_fd=at)
        except OSError:
            os.close(at)
            raise
        if inner != at:
            os.close(at)
        at = inner
        if not is_private(os.fstat(at)):
            os.close(at)
            raise _exchangeable(place)
    return at


def make_private(folder: Path, *, below: Path) -> None:
    """Make ``folder`` and those between it and ``below`` where they are missing; what is this user's of them is closed.

    What lies above is left as it is, and must be fit already: a ``PermissionError`` as of ``open_private``.
    """
    missing = [place for place in reversed(below.parents) if not place.exists()]
    own = [below, *(below / part for part in _parts_below(folder, below))]
    for place in [*missing, *own]:
        at = open_private(place.parent)
        try:
            with suppress(FileExistsError):
                os.mkdir(place.name, _MODE, dir_fd=at)
            status = os.stat(place.name, dir_fd=at, follow_symlinks=False)
            is_open = stat.S_ISDIR(status.st_mode) and not is_private(status)
            if is_open and status.st_uid == os.geteuid():
                os.chmod(place.name, stat.S_IMODE(status.st_mode) & ~_OTHERS, dir_fd=at)
        finally:
            os.close(at)


def is_private(status: os.stat_result) -> bool:
    """Return whether what has this ``status`` is this user's or root's, and nobody else could exchange it or what it
    holds.
    """
    is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    return status.st_uid in (0, os.geteuid()) and bool(is_sticky or not status.st_mode & _OTHERS)


def _parts_below(folder: Path, below: Path) -> list[Path]:
    parts = folder.relative_to(below).parts
    return [Path(*parts[: count + 1]) for count in range(len(parts))]


def _flags() -> int:
    """Return how a folder is opened: where the system can, without having to be readable."""
    return os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)


def _exchangeable(place: Path) -> PermissionError:
    advice = "others may write to it, or it is somebody else's; chmod go-w it, or set XDG_CACHE_HOME"
    return PermissionError(errno.EPERM, advice, str(place))
