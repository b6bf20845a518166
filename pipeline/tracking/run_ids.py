"""``tracker.json``: which run of a tracker's store is that of this folder, of a run or of a sweep."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from offstage.pipeline.atomic_files import replace_file
from offstage.pipeline.regular_files import read_object
from offstage.pipeline.tracking.options import TrackerConfig

FILE_NAME = "tracker.json"


@dataclass(frozen=True, slots=True)
class RunId:
    """The run ``run_id`` of an ``experiment`` in a ``store``, a server's address or a folder.

    ``started`` is when the run of the record began that it tells of, by which a later one in the same folder is told
    apart; empty for a sweep. ``whole`` says whether all of it was logged.
    """

    store: str
    experiment: str
    run_id: str
    started: str = ""
    whole: bool = False


def find_id(folder: Path, tracker: TrackerConfig, *, started: str = "") -> RunId | None:
    """Return which run of the ``tracker`` is that of ``folder``; null where it has none yet."""
    wanted = (tracker.store, tracker.experiment, started)
    return next((one for one in read_ids(folder) if (one.store, one.experiment, one.started) == wanted), None)


def read_ids(folder: Path) -> list[RunId]:
    """Return all that ``folder`` notes; nothing where there is no such file, or not one of ours."""
    try:
        return [RunId(**noted) for noted in read_object(folder / FILE_NAME)["runs"]]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def note_id(folder: Path, found: RunId) -> None:
    """Note ``found`` in ``folder``, in the place of what is noted of the same run."""
    others = [one for one in read_ids(folder) if one.run_id != found.run_id]
    text = json.dumps({"runs": [asdict(one) for one in (*others, found)]}, indent=1) + "\n"
    replace_file(folder / FILE_NAME, text)


def note_whole(folder: Path, found: RunId) -> None:
    """Note that all of ``found`` was logged."""
    note_id(folder, replace(found, whole=True))
