"""Locks: how processes wait for each other, and how a run keeps what it uses from being pruned.

A lock is on a hidden file beside what it stands for. The kernel lets go of it when its process ends, however it ends,
so none is ever stale and none needs a heartbeat. Some file systems grant a lock to all, some to none, and a cache may
be read-only or another user's: nothing but time depends on a lock, and one that can't be had never fails a run.

A run holds a shared lock, a lease, beside each artifact that it uses, and the pruner takes an artifact only under the
exclusive lock of that file. Where there are no locks the pruner, which can't know then, takes nothing.
"""

from __future__ import annotations

import errno
import logging
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path

try:
    import fcntl
except ImportError:  # pragma: no cover - no such locks on this system: nobody waits, nothing is leased or pruned
    fcntl = None  # type: ignore[assignment]

LOCK, LEASE = ".lock", ".use.lock"
SHARED = ".shared.use.lock"
"""The lease of what several artifacts share (the offload stores), held by every run that works."""
_log = logging.getLogger("offstage")


class Grant(Enum):
    """What became of asking for a lock: it is held, another process has it, or none is to be had here."""

    HELD = "held"
    BUSY = "busy"
    NO_LOCKS = "no locks"


def lock(path: Path, *, wait: bool = True, exclusive: bool = True) -> int:
    """Return the descriptor of the locked file ``path``; the lock ends where it, and each copy of it, is closed.

    The file may be removed between opening and locking it: then the lock is worth nothing, and another try is made.
    Raises ``BlockingIOError`` where another holds it and this one isn't to ``wait``, ``OSError`` where there is none.
    """
    if fcntl is None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    kind = (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | (0 if wait else fcntl.LOCK_NB)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        is_there = False
        try:
            fcntl.flock(descriptor, kind)
            is_there = os.fstat(descriptor).st_nlink > 0
        finally:
            if not is_there:
                os.close(descriptor)
        if is_there:
            return descriptor


@contextmanager
def locked(path: Path, *, work: str, wait: bool = True) -> Iterator[Grant]:
    """Hold the lock of ``path``, a hidden file beside it; another's is waited for unless ``wait`` is False.

    ``work`` says what it is held for, for the log of one that waits: ``builds plan``.
    """
    descriptor, grant = _ask(path.with_name(f".{path.name}{LOCK}"), path, work=work, wait=wait)
    try:
        yield grant
    finally:
        if descriptor is not None:
            _close(descriptor)


def _ask(file: Path, path: Path, *, work: str, wait: bool) -> tuple[int | None, Grant]:
    try:
        return lock(file, wait=False), Grant.HELD
    except BlockingIOError:
        if not wait:
            return None, Grant.BUSY
        _log.info("waiting for another process that %s (%s)", work, path)
    except OSError:
        _log.debug("%s: no lock to be had here; going on without", path)
        return None, Grant.NO_LOCKS
    try:
        return lock(file), Grant.HELD
    except OSError:
        return None, Grant.NO_LOCKS


def _close(descriptor: int) -> None:
    with suppress(OSError):  # closed all the same, and nothing was written
        os.close(descriptor)


def lease_path(folder: Path) -> Path:
    """Return the file whose lock stands for the use of the artifact in ``folder``."""
    return folder.with_name(f".{folder.name}{LEASE}")


class Leases:
    """The leases of one run. They end with ``release``, with this object, or with the process."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        weakref.finalize(
            self, _end, self._descriptors
        )  # and at the process's end while there still are functions to call

    def hold(self, path: Path) -> None:
        """Hold the lease ``path`` from now on; without one where none can be had.

        Waits while the pruner has it, which is as long as a rename takes. Call it before looking for what it keeps.
        """
        if path not in self._descriptors:
            with suppress(OSError):
                self._descriptors[path] = lock(path, exclusive=False)

    def release(self) -> None:
        """End every lease."""
        _end(self._descriptors)


def _end(descriptors: dict[Path, int]) -> None:
    while descriptors:
        _close(descriptors.popitem()[1])


@contextmanager
def sole_use(path: Path) -> Iterator[bool]:
    """Yield whether nobody holds the lock of the file ``path``; nobody can take it before the block ends.

    Yields False too where locks don't work. The file is gone afterwards if it was free.
    """
    try:
        descriptor = lock(path, wait=False)
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        path.unlink(missing_ok=True)
        _close(descriptor)
