"""Artifacts by content, shared by every process that uses their folder; and where the user's own cache lies."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """Return where figures and artifacts are kept for those who name no folder: ``$XDG_CACHE_HOME/offstage``.

    It lies beside the caches of projects, for what hangs on the machine alone, or on a file. A ``RuntimeError`` where
    the user has no home.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "offstage"
