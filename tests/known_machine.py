"""What is known of this machine, for users' caches of tests' own: measured and compiled once, not in each of them."""

from __future__ import annotations

import shutil
from pathlib import Path

from offstage.pipeline.cache import user_cache
from offstage.pipeline.stage import MEASURED
from offstage.stages.checkpoints.codecs import loops
from offstage.stages.machine import compiled_code


def copy_known(home: Path) -> Path:
    """Copy what the user's cache knows of this machine, compiled loops among it, to the one of who has ``home`` as
    ``$XDG_CACHE_HOME``; return where that lies.
    """
    loops.build()
    cache = home / user_cache().name
    for known in (MEASURED, compiled_code.FOLDER):
        if (user_cache() / known).is_dir():
            shutil.copytree(user_cache() / known, cache / known, ignore=shutil.ignore_patterns(".*"))
    return cache
