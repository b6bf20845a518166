"""Commands under a real memory cap: a memory cgroup of version 1 or 2, made for one command and removed after it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from offstage.pipeline.memory_cgroups import CapError, MemoryGroup, make_group


def can_cap() -> bool:
    """Return whether this process may cap memory, by trying."""
    try:
        with cap(1 << 40):
            return True
    except CapError:
        return False


@contextmanager
def cap(limit_bytes: int) -> Iterator[MemoryGroup]:
    """Lend a memory cgroup that holds at most ``limit_bytes``, page cache included; may raise ``CapError``."""
    group = make_group()
    try:
        group.limit(limit_bytes)
        yield group
    finally:
        _remove(group.folder)


def _remove(folder: Path) -> None:
    """End what still runs in the cgroup (children of a command that was killed or took too long), and remove it."""
    for _ in range(50):
        for line in folder.joinpath("cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(line), signal.SIGKILL)
        try:
            return folder.rmdir()
        except OSError:  # the dead are counted until they are reaped
            time.sleep(0.1)
    return folder.rmdir()


def run_capped(
    command: Sequence[str],
    limit_bytes: int,
    *,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    timeout_seconds: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run ``command`` under a cap and return it finished; return code -9 means that the cap killed it.

    Raises ``subprocess.TimeoutExpired`` where it takes longer than ``timeout_seconds``; it is ended then.
    """
    with cap(limit_bytes) as group:
        return subprocess.run(
            group.entering([*command]),
            cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=timeout_seconds,
        )  # fmt: skip


def drop_page_cache() -> None:
    """Write what is dirty and forget the page cache, so that the next side begins cold."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")
