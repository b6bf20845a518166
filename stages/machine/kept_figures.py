"""What was measured of the machine, kept in a file of the cache: measured once, read ever after.

A speed that was measured while other processes computed says as much of them. It is used and kept, but apart, and
measured again by the first run that finds the processor idle an hour later or more: jobs that run one after the other
plan with the same figures.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from offstage.pipeline.cache import user_cache
from offstage.pipeline.cache.locks import locked
from offstage.pipeline.cache.sealed_files import DamagedError, read_sealed, settle_sealed, write_sealed
from offstage.pipeline.stage import MEASURED
from offstage.stages.machine.processor import ProcessorMeter

_log = logging.getLogger("offstage")

Name = TypeVar("Name", bound=Hashable)
_File = dict[str, Any]
"""What a file holds: figures by key. One that was disturbed is under ``_apart(key)``, with when it was measured."""

AGAIN_SECONDS = 3600
"""How long a figure that was disturbed stands at the least."""
_LOOK_SECONDS, _LOOK_EVERY = 0.5, 60


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFigures(Generic[Name]):
    """What ``probe`` measures of those names that it is given, plain JSON data: kept in ``file`` under their ``keys``,
    which say all that each hangs on.

    What a probe returns as null, or not at all, it couldn't measure: it is asked again the next time. Figures that are
    ``of_user`` hang on processor and installed packages alone: before they are measured they are looked for in the
    user's own cache, and kept there too. Those that ``are_speeds`` are disturbed by whoever else computes.
    """

    file: str
    keys: Mapping[Name, str]
    probe: Callable[[Collection[Name]], Mapping[Name, Any]]
    of_user: bool = False
    are_speeds: bool = False

    def get(self, folder: Path) -> tuple[dict[Name, Any], bool]:
        """Return the figures by name, as ``folder`` keeps them, or measured now and kept there; and whether others
        disturbed one.

        Those that can't be measured aren't among them. One process measures at a time: runs that start together must
        plan with the same figures. Where nothing can be kept each run measures for itself.
        """
        folders = [folder]
        with suppress(RuntimeError):  # a user without a home
            shared = user_cache() / MEASURED
            folders += [shared] if self.of_user and shared.resolve() != folder.resolve() else []
        kept = self._find([each / self.file for each in folders], list(self.keys))
        settled = {name: kept[key] for name, key in self.keys.items() if key in kept}
        lacking = {name: kept.get(_apart(key)) for name, key in self.keys.items() if key not in kept}
        disturbed = {name: each["figure"] for name, each in lacking.items() if each is not None}
        return settled | disturbed, bool(disturbed)

    def _find(self, paths: Sequence[Path], names: Collection[Name]) -> _File:
        """Return what the first of ``paths`` holds, ``names`` among it where the others have them or they are measured
        now.
        """
        path, others = paths[0], paths[1:]
        with suppress(DamagedError, OSError):
            kept = read_sealed(path) or {}
            if not self._lacking(kept, names, measures=not others):
                return kept
        with locked(path, work="measures this machine"):
            kept = _settle(path)
            if lacking := self._lacking(kept, names, measures=not others):
                found = self._find(others, lacking) if others else self._measure(lacking)
                before, kept = kept, _renewed(kept, found, [self.keys[name] for name in lacking])
                if kept != before:
                    _keep(path, kept)
        return kept

    def _lacking(self, kept: _File, names: Collection[Name], *, measures: bool) -> list[Name]:
        """Return of ``names`` those that aren't ``kept``, or no longer as they are."""
        lacking = [name for name in names if self.keys[name] not in kept]
        disturbed = {name: kept[apart] for name in lacking if (apart := _apart(self.keys[name])) in kept}
        old = {name for name, figure in disturbed.items() if abs(time.time() - figure["at"]) >= AGAIN_SECONDS}
        if measures and old and not _is_idle(int(time.monotonic() // _LOOK_EVERY)):
            old = set()
        return [name for name in lacking if name not in disturbed or name in old]

    def _measure(self, names: Collection[Name]) -> _File:
        """Return what is found of ``names``: nothing where the machine refuses it, an accelerator without free memory
        for one.

        A torch that was built without accelerators says so by an ``AssertionError``.
        """
        meter = ProcessorMeter()
        try:
            figures = self.probe(names)
        except (OSError, RuntimeError, AssertionError):
            return {}
        found = {self.keys[name]: figures[name] for name in names if figures.get(name) is not None}
        if self.are_speeds and meter.use().is_shared:
            return {_apart(key): {"figure": figure, "at": int(time.time())} for key, figure in found.items()}
        return found


def kept_figure(
    folder: Path, file: str, key: str, probe: Callable[[], Any], *, nominal: Any = None, of_user: bool = False
) -> Any:
    """Return the one figure that ``probe`` measures, kept in ``file`` of ``folder`` under ``key``; ``nominal`` where it
    can't be measured.
    """
    figures = KeptFigures(file=file, keys={key: key}, probe=lambda _: {key: probe()}, of_user=of_user)
    return figures.get(folder)[0].get(key, nominal)


def kept_speeds(
    folder: Path,
    file: str,
    keys: Mapping[Name, str],
    probe: Callable[[Collection[Name]], Mapping[Name, Any]],
    *,
    of_user: bool = False,
) -> tuple[dict[Name, Any], bool]:
    """Return by name the speeds that ``probe`` measures, kept in ``file`` of ``folder`` under ``keys``, and whether
    others disturbed one; those that can't be measured aren't among them.
    """
    return KeptFigures(file=file, keys=keys, probe=probe, of_user=of_user, are_speeds=True).get(folder)


def _apart(key: str) -> str:
    return f"{key} while others computed"


def _renewed(kept: _File, found: _File, keys: Sequence[str]) -> _File:
    """Return ``kept`` with what was ``found`` under ``keys`` in place of what it had there."""
    for key in keys:
        places = key, _apart(key)
        if new := {place: found[place] for place in places if place in found}:
            kept = {place: figure for place, figure in kept.items() if place not in places} | new
    return kept


@lru_cache(maxsize=1)
def _is_idle(_period: int) -> bool:
    """Return whether nobody else computes; in one period a process looks once, however many figures it asks for."""
    meter = ProcessorMeter()
    time.sleep(_LOOK_SECONDS)
    return meter.use().is_shared is False


def _settle(path: Path) -> _File:
    try:
        return settle_sealed(path) or {}
    except OSError as error:
        _log.info("%s: can't be read (%s); this run measures for itself", path, error.strerror)
        return {}


def _keep(path: Path, figures: _File) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_sealed(path, figures)
    except OSError as error:
        _log.info("%s: can't be written (%s); the next run measures again", path, error.strerror)
