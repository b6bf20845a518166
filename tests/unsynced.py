"""Files of tests are never waited for until they rest on a disk: they outlive no machine."""

from __future__ import annotations

import os


def leave_unsynced() -> None:
    """Have this process's ``os.fsync`` only look whether it was given an open file.

    A run of a small model calls it forty times, each a wait for the disk. Who is killed loses nothing by that: what was
    written is the system's. Commands that are processes from their start do sync.
    """
    os.fsync = os.fstat  # type: ignore[assignment]
