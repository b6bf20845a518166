"""Probes that run in a process of their own: what they take of memory is no part of a run's peak."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from offstage.stages.machine.host_memory import PROCESS_BYTES, host_memory

_SECONDS = 300
_PROGRAM = (
    "from offstage.stages.machine.own_process import be_expendable; be_expendable(); "
    "from offstage.stages.machine.{module} import be_measured; be_measured()"
)


def has_room(beside: int = 0) -> bool:
    """Return whether the host has memory for a second process beside this one, and so many bytes ``beside``."""
    return host_memory().available_bytes >= 2 * PROCESS_BYTES + beside


def measure_apart(module: str, *arguments: str, folder: Path | None = None) -> bytes | None:
    """Return what ``be_measured`` of ``module`` prints in a process of its own, in ``folder``; null where it fails."""
    command = [sys.executable, "-P", "-c", _PROGRAM.format(module=module), *arguments]
    try:
        done = subprocess.run(
            command, cwd=folder, timeout=_SECONDS, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None
    return done.stdout if done.returncode == 0 else None


def be_expendable() -> None:
    """Have this process be the first to be ended where memory is short, and be ended with the one who waits for it."""
    from offstage.pipeline.process_setup import die_with_parent

    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    die_with_parent()
