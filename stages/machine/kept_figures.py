"""What was measured of the machine, kept in a file of the cache: measured once, read ever after."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offstage.pipeline.cache import user_cache
from offstage.pipeline.cache.locks import locked
from offstage.pipeline.cache.sealed_files import DamagedError, read_sealed, settle_sealed, write_sealed
from offstage.pipeline.stage import MEASURED

_log = logging.getLogger("offstage")


@dataclass(frozen=True, slots=True)
class KeptFigure:
    """What ``probe`` measures, plain JSON data: kept in ``file`` under ``key``, which says all that it hangs on.

    A probe that returns null has measured nothing: it is asked again the next time, and until then the figure is
    ``nominal``. One that is ``of_user`` hangs on processor and installed packages alone: before it is measured it is
    looked for in the user's own cache, and kept there too.
    """

    file: str
    key: str
    probe: Callable[[], Any]
    nominal: Any = None
    of_user: bool = False

    def get(self, folder: Path) -> Any:
        """Return the figure: as ``folder`` keeps it, or measured now and kept there.

        One process measures at a time: runs that start together must plan with the same figures. Where nothing can be
        kept each run measures for itself.
        """
        figure = self._find(self._folders(folder))
        return self.nominal if figure is None else figure

    def is_kept(self, folder: Path) -> bool:
        """Return whether it needn't be measured, as far as can be said before ``get`` has a lock."""
        return any(self._kept_in(each) is not None for each in self._folders(folder))

    def _folders(self, folder: Path) -> list[Path]:
        """Return where it is looked for: in ``folder``, and in the user's own."""
        folders = [folder]
        with suppress(RuntimeError):  # a user without a home
            shared = user_cache() / MEASURED
            folders += [shared] if self.of_user and shared.resolve() != folder.resolve() else []
        return folders

    def _kept_in(self, folder: Path) -> Any:
        with suppress(DamagedError, OSError):
            return (read_sealed(folder / self.file) or {}).get(self.key)

    def _find(self, folders: Sequence[Path]) -> Any:
        path, others = folders[0] / self.file, folders[1:]
        if (kept := self._kept_in(folders[0])) is not None:
            return kept
        with locked(path, work="measures this machine"):
            figures = _settle(path)
            if self.key in figures:
                return figures[self.key]
            figure = self._find(others) if others else _measure(self.probe)
            if figure is not None:
                _keep(path, {**figures, self.key: figure})
        return figure


def _settle(path: Path) -> dict[str, Any]:
    try:
        return settle_sealed(path) or {}
    except OSError as error:
        _log.info("%s: can't be read (%s); this run measures for itself", path, error.strerror)
        return {}


def _keep(path: Path, figures: dict[str, Any]) -> None:
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
