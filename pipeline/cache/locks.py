"""Locks that save doing work twice.

Some file systems grant a lock to all, some to none, and a cache may be read-only or another user's: nothing but time
depends on a lock, and one that can't be had never fails a run.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from offstage.pipeline.cache.leftovers import LOCK

_log = logging.getLogger("offstage")
_NO_LOCK = (OSError, RuntimeError)
"""What filelock raises where it can't lock: by its release and the file system, one or the other."""


@contextmanager
def locked(path: Path, *, work: str, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of ``path``, a hidden file beside it.

    Yields False only if another process has it and ``wait`` is False. ``work`` says what it is held for, for the log
    of one that waits: ``builds plan``.
    """
    lock = FileLock(path.with_name(f".{path.name}{LOCK}"))
    try:
        yield _acquire(lock, path, work=work, wait=wait)
    finally:
        with suppress(*_NO_LOCK):
            lock.release()


def _acquire(lock: BaseFileLock, path: Path, *, work: str, wait: bool) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it makes do with a stand-in where flock is missing
            lock.acquire(timeout=0)
    except Timeout:
        return wait and _wait(lock, path, work)
    except _NO_LOCK:
        _log.debug("%s: no lock to be had here; going on without", path)
    return True


def _wait(lock: BaseFileLock, path: Path, work: str) -> bool:
    """Wait for the lock, however long the other works. Returns True, also if in the end there is no lock."""
    if isinstance(lock, SoftFileLock):
        return True  # what filelock makes do with where flock is missing: a file that outlives a killed holder
    _log.info("waiting for another process that %s (%s)", work, path)
    with suppress(*_NO_LOCK):
        lock.acquire()
    return True
