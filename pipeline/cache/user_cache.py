"""The cache of the user who runs this, beside that of a project: what hangs on the machine alone, or on a file."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """Return where figures and artifacts are kept for those who name no folder: ``$XDG_CACHE_HOME/offstage``.

    A ``RuntimeError`` where the user has no home.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "offstage"
