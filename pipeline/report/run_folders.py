"""From the paths that a user gives to the runs below them, and the files there that can't be read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from offstage.pipeline.errors import StorageError
from offstage.pipeline.record import RECORD, RecordError, read_run
from offstage.pipeline.run_schema import Run

_CACHE = "cache"
_HYDRA = ".hydra"


@dataclass(frozen=True, slots=True)
class Job:
    """A run and the short name, ``#3``, that it goes by in the report.

    ``link`` is the URL of its folder as the page has it, relative to where that lies; empty where there is no page.
    """

    name: str
    run: Run
    link: str = ""


@dataclass(frozen=True, slots=True)
class Problem:
    """A file or folder that should hold a record and whose record can't be read."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class Found:
    """Every job below the given paths, in the order of their folders' names, numbers by value."""

    jobs: tuple[Job, ...]
    problems: tuple[Problem, ...]


def find(paths: Sequence[Path], *, page_folder: Path | None = None) -> Found:
    """Return the jobs below ``paths``: run folders, sweeps, or whole trees of them; each run counts once.

    The page that links to them will lie in ``page_folder``.

    Raises:
        StorageError: a path isn't there, or nothing below any of them is a run.
    """
    places: dict[Path, str] = {}
    for path in paths:
        if not path.exists():
            raise StorageError(f"{path}: there is nothing; give the folder of a run or of a sweep")
        for place, fault in _candidates(path):
            places.setdefault(place.resolve(), fault)
    runs: list[Run] = []
    problems: list[Problem] = []
    for place in sorted(places, key=lambda place: list(map(natural, place.parts))):
        try:
            if places[place]:
                raise RecordError(place, places[place])
            runs.append(read_run(place))
        except RecordError as error:
            problems.append(Problem(place, error.reason))
    if not runs and not problems:
        raise StorageError(f"{', '.join(map(str, paths))}: no {RECORD} there; give the folder of a run or of a sweep")
    names = _names(runs)
    links = [_link(run.folder, page_folder) if page_folder else "" for run in runs]
    return Found(tuple(map(Job, names, runs, links)), tuple(problems))


def find_one(path: Path) -> Run:
    """Return the one run that ``path`` names. Raises ``StorageError`` where it holds none, or several."""
    runs = find([path])
    if runs.problems:
        raise StorageError(f"{runs.problems[0].path}: {runs.problems[0].reason}; give the folder of another run")
    if len(runs.jobs) > 1:
        names = ", ".join(job.run.folder.name for job in runs.jobs[:4])
        raise StorageError(f"{path}: {len(runs.jobs)} runs there ({names}, …); give the folder of one")
    return runs.jobs[0].run


def _candidates(path: Path) -> Iterator[tuple[Path, str]]:
    """Yield every record below ``path`` with an empty string, and what can't be looked into with the reason."""
    if not path.is_dir():
        yield path, ""
        return
    unseen: list[OSError] = []
    for folder, folders, files in os.walk(path, onerror=unseen.append):
        fault = _fault(folders, files)
        if fault is not None:
            yield Path(folder) / RECORD, fault
        folders[:] = [name for name in folders if not name.startswith(".") and name not in (_CACHE, RECORD)]
    for error in unseen:
        yield Path(str(error.filename)), error.strerror or str(error)


def _fault(folders: Sequence[str], files: Sequence[str]) -> str | None:
    """Return what is wrong with a folder's record before it is read: an empty string is nothing, None is no run."""
    if RECORD in files:
        return ""
    if RECORD in folders:
        return "a folder, not a file"
    return "missing: the job ended before it wrote one" if _HYDRA in folders else None


def natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that takes the numbers in ``text`` for numbers."""
    return tuple((0, int(piece), "") if piece.isdecimal() else (1, 0, piece) for piece in re.split(r"(\d+)", text))


def _names(runs: Sequence[Run]) -> list[str]:
    """Name the jobs of one sweep as Hydra numbered them, any others in the order that they are listed in."""
    names = [run.folder.name for run in runs]
    one_sweep = len({run.folder.parent for run in runs}) == 1 and all(name.isdecimal() for name in names)
    return [f"#{name if one_sweep else index}" for index, name in enumerate(names)]


def _link(folder: Path, page_folder: Path) -> str:
    """Return the relative URL from a page in ``page_folder`` to ``folder``; bytes that are no text are escaped too."""
    return quote(os.fsencode(os.path.relpath(folder, page_folder.resolve()))) + "/"
