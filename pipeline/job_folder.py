"""The folder of a sweep's job, in the hands of one process at a time.

A job may find that it was begun before: by a sweep that was interrupted, by the queue of a cluster that began it again,
by a sweep whose own process was killed and whose jobs went on. Whoever is still at it is waited for; what completed
isn't run again; what didn't is set aside, and the job begins anew.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from types import TracebackType

from offstage.pipeline.atomic_files import mendable
from offstage.pipeline.cache.locks import lock
from offstage.pipeline.errors import StorageError
from offstage.pipeline.record import RECORD, RunRecord

_LOCK = ".job.lock"


def may_be_at_work(folder: Path) -> bool:
    """Return whether a process may have the job's ``folder`` in its hands: one does, or there are no locks to tell."""
    try:
        os.close(lock(folder / _LOCK, wait=False))
    except OSError:
        return True
    return False


def find_record(folder: Path, overrides: Sequence[str]) -> RunRecord | None:
    """Return the record of the run with these ``overrides`` in the job's ``folder``, null where none can be read."""
    try:
        record = RunRecord.load(folder / RECORD)
    except StorageError:
        return None
    return record if record.run.overrides == tuple(overrides) else None


def completed(folder: Path, overrides: Sequence[str]) -> bool:
    """Return whether the run with these ``overrides`` lies in the job's ``folder``, completed."""
    record = find_record(folder, overrides)
    return record is not None and record.run.status == "completed"


class JobFolder:
    """A job's ``folder``, which is ``taken`` when nobody works in it any more, and held to the end of the context.

    ``lock`` is the descriptor of the lock: a process that inherits it holds the folder too, so that a job whose waiting
    process was killed keeps it to its own end. Null where no locks are to be had.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.lock: int | None = None

    def __enter__(self) -> JobFolder:
        return self

    def taken(self) -> bool:
        """Return whether the folder is held now; not while another process works in it."""
        with mendable(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            try:
                self.lock = lock(self._folder / _LOCK, wait=False)
            except BlockingIOError:
                return False
            except OSError:  # a file system without locks: go on, as if nobody were there
                pass
        return True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    def has_completed(self, overrides: Sequence[str]) -> bool:
        """Return whether the run of these overrides lies here, completed. One that isn't is set aside.

        The record of other overrides stays: two jobs never share a folder, and who starts its record there is told so.
        """
        path = self._folder / RECORD
        if completed(self._folder, overrides):
            return True
        if not path.exists() or RunRecord.load(path).run.overrides != tuple(overrides):
            return False
        free = next(name for number in count(1) if not (name := path.with_stem(f"{path.stem}-{number}")).exists())
        with mendable(self._folder):
            path.rename(free)
        return False
