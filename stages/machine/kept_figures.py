"""What was measured of the machine, kept in a file of the cache: measured once, read ever after."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from offstage.pipeline.cache.locks import locked
from offstage.pipeline.cache.manifest import DamagedError
from offstage.pipeline.cache.sealed_files import read_sealed, settle_sealed, write_sealed
from offstage.pipeline.cache.user_cache import user_cache
from offstage.pipeline.stage import MEASURED

_log = logging.getLogger("offstage")


def kept_or_measured(
    path: Path, wanted: Mapping[str, Callable[[], Any]], *, is_sound: Callable[[Any], bool]
) -> dict[str, Any]:
    """Return what ``path`` keeps, by name; what it lacks of ``wanted`` (name → probe) is measured and kept too.

    A figure for which ``is_sound`` is false is neither taken nor kept. A probe that returns null, or nothing sound,
    leaves nothing: it is asked again the next time. One process measures at a time: runs that start together must plan
    with the same figures. Where nothing can be kept each run measures for itself.
    """
    with suppress(DamagedError, OSError):
        kept = _sound(read_sealed(path), is_sound)
        if wanted.keys() <= kept.keys():
            return kept
    with locked(path, work="measures this machine"):
        kept = _settle(path, is_sound)
        fresh = {key: _measure(probe) for key, probe in wanted.items() if key not in kept}
        found = kept | _sound(fresh, is_sound)
        if found != kept:
            _keep(path, found)
    return found


def kept_for_user(
    path: Path, wanted: Mapping[str, Callable[[], Any]], *, is_sound: Callable[[Any], bool]
) -> dict[str, Any]:
    """Return what ``kept_or_measured`` does of figures that hang on processor and installed packages alone.

    What ``path`` lacks of them another cache of this user may have: before it is measured it is looked for in the
    user's own, and kept there too.
    """
    try:
        shared = user_cache() / MEASURED / path.name
    except RuntimeError:  # a user without a home
        return kept_or_measured(path, wanted, is_sound=is_sound)
    if shared.resolve() == path.resolve():
        return kept_or_measured(path, wanted, is_sound=is_sound)

    def find(key: str, probe: Callable[[], Any]) -> Any:
        return kept_or_measured(shared, {key: probe}, is_sound=is_sound).get(key)

    return kept_or_measured(path, {key: partial(find, key, probe) for key, probe in wanted.items()}, is_sound=is_sound)


def _sound(figures: Any, is_sound: Callable[[Any], bool]) -> dict[str, Any]:
    return {key: figure for key, figure in figures.items() if is_sound(figure)} if isinstance(figures, dict) else {}


def _settle(path: Path, is_sound: Callable[[Any], bool]) -> dict[str, Any]:
    try:
        return _sound(settle_sealed(path), is_sound)
    except OSError as error:
        _log.info("%s: can't be read (%s); this run measures for itself", path, error.strerror)
        return {}


def _keep(path: Path, figures: Mapping[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_sealed(path, figures)
    except OSError as error:
        _log.info("%s: can't be written (%s); the next run measures again", path, error.strerror)


def _measure(probe: Callable[[], Any]) -> Any:
    """Return what ``probe`` measures; null where the machine refuses it: an accelerator without free memory, say.

    A torch that was built without accelerators says so by an ``AssertionError``.
    """
    try:
        return probe()
    except (OSError, RuntimeError, AssertionError):
        return None
