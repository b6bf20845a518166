"""Leases: how a run keeps what it uses from being pruned.

A run holds a shared lock on a file beside each artifact that it uses, and the pruner takes an artifact only under
the exclusive lock of that file. The kernel lets go of a lock when its process ends, however it ends, so no lease is
ever stale and none needs a heartbeat. Where a file system grants no such locks a run goes on without, and the pruner,
which can't know then, takes nothing.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # pragma: no cover - no such locks on this system: nothing is leased, and nothing pruned
    fcntl = None  # type: ignore[assignment]

LEASE = ".use.lock"
SHARED = ".shared.use.lock"
"""The lease of what several artifacts share (the offload stores), held by every run that works."""


def lease_path(folder: Path) -> Path:
    """Return the file whose lock stands for the use of the artifact in ``folder``."""
    return folder.with_name(f".{folder.name}{LEASE}")


class Leases:
    """The leases of one run. They end with ``release``, with this object, or with the process."""

    def __init__(self) -> None:
        self._held: dict[Path, int] = {}

    def __del__(self) -> None:
        self.release()

    def hold(self, path: Path) -> None:
        """Hold the lease ``path`` from now on; without one where none can be had.

        Waits while the pruner has it, which is as long as a rename takes. Call it before looking for what it keeps.
        """
        if path in self._held:
            return
        with suppress(OSError):
            self._held[path] = _lock(path, wait=True, exclusive=False)

    def release(self) -> None:
        """End every lease."""
        while self._held:
            with suppress(OSError):  # closed all the same, and nothing was written
                os.close(self._held.popitem()[1])


@contextmanager
def sole_use(path: Path) -> Iterator[bool]:
    """Yield whether nobody holds the lease ``path``; nobody can take it before the block ends.

    Yields False too where locks don't work. The lease's file is gone afterwards if it was free.
    """
    try:
        descriptor = _lock(path, wait=False, exclusive=True)
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _lock(path: Path, *, wait: bool, exclusive: bool) -> int:
    """Return the descriptor of the locked file ``path``; raises ``OSError`` where that fails.

    The file may be removed between opening and locking it: then the lock is worth nothing, and another try is made.
    """
    if fcntl is None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    kind = (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | (0 if wait else fcntl.LOCK_NB)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, kind)
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)
