"""Commands under a real memory cap: a memory cgroup of version 1 or 2, made for one command and removed after it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


def can_cap() -> bool:
    """Return whether this process may make memory cgroups."""
    root = V1 if V1.is_dir() else V2
    return os.access(root, os.W_OK) and (V1.is_dir() or (V2 / "cgroup.controllers").is_file())


@contextmanager
def cap(limit_bytes: int) -> Iterator[Path]:
    """Lend the folder of a memory cgroup that holds at most ``limit_bytes``, page cache included."""
    old = V1.is_dir()
    folder = (V1 if old else V2) / f"offstage-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    try:
        folder.joinpath("memory.limit_in_bytes" if old else "memory.max").write_text(str(limit_bytes))
        yield folder
    finally:
        _remove(folder)


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
    with cap(limit_bytes) as folder:
        enter = f'echo $$ > {folder}/cgroup.procs; exec "$@"'
        return subprocess.run(
            ["bash", "-c", enter, "capped", *command],
            cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=timeout_seconds,
        )  # fmt: skip


def drop_page_cache() -> None:
    """Write what is dirty and forget the page cache, so that the next side begins cold."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")
