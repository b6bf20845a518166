"""Folders that nobody else may change, as ssh asks of those of keys: for what is run, not only read.

Code that lies in a file is whatever that file is when it is loaded. So each folder on the way must be this user's or
root's, and closed to what others would write; one that is sticky, as ``/tmp`` is, may be written to, since nobody
exchanges there what isn't theirs. They are looked at from the root on: what lies in one that is fit is nobody else's to
exchange by the time that it is looked at itself.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_MODE = 0o700


def require_private(folder: Path) -> None:
    """Raise an ``OSError`` unless ``folder``, an absolute path without links, is one that nobody else can exchange.

    A ``PermissionError`` names the folder on the way that somebody else could exchange something in, and says what to
    do; any other says that there is no such folder.
    """
    for place in [*reversed(folder.parents), folder]:
        status = place.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(place))
        if not is_private(status):
            advice = "others may write to it, or it is somebody else's; chmod go-w it, or set XDG_CACHE_HOME"
            raise PermissionError(errno.EPERM, advice, str(place))


def make_private(folder: Path, *, below: Path) -> None:
    """Make ``folder`` and those between it and ``below`` where they are missing; what is this user's of them is closed.

    What lies above is left as it is, and must be fit already: a ``PermissionError`` as of ``require_private``.
    """
    missing = [place for place in reversed(below.parents) if not place.exists()]
    own = [place for place in reversed(folder.parents) if below in place.parents or place == below]
    for place in [*missing, *own, folder]:
        require_private(place.parent)
        place.mkdir(_MODE, exist_ok=True)
        status = place.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not is_private(status):
            place.chmod(stat.S_IMODE(status.st_mode) & ~_OTHERS)


def is_private(status: os.stat_result) -> bool:
    """Return whether what has this ``status`` is this user's or root's, and nobody else could exchange it or what it
    holds.
    """
    is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    return status.st_uid in (0, os.geteuid()) and bool(is_sticky or not status.st_mode & _OTHERS)
