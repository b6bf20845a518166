"""Memory caps: a group of processes that the kernel ends when it holds more than the plan allows.

Linux has two interfaces for such groups (kernel documentation, ``cgroup-v1/memory`` and ``admin-guide/cgroup-v2``).
A job's process is started inside its group, so that all it ever holds counts; the limit is set when its plan is known.
Page cache counts too, but the kernel takes it back before it ends anything. Swap is not allowed to help.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

KERNEL_BYTES = 32 * 2**20
"""What the kernel charges to a group beside its processes' own pages: page tables, stacks, file handles."""

_PREFIX = "offstage-"


class CapError(Exception):
    """This process may not cap memory here; the message says why."""


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """One group, by its folder in the interface of ``version``."""

    folder: Path
    version: Literal[1, 2]

    def limit(self, count: int) -> None:
        """Allow ``count`` bytes from now on; a ``CapError`` where the group holds more already or it isn't granted."""
        limits = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
        name, swap = limits if self.version == 1 else ("memory.max", "memory.swap.max")
        try:
            self.folder.joinpath(name).write_text(str(count))
        except OSError as error:
            raise CapError(f"{self.folder / name}: {error.strerror}") from error
        with suppress(OSError):  # a kernel without swap accounting has no such file
            self.folder.joinpath(swap).write_text(str(count if self.version == 1 else 0))

    def kills(self) -> int:
        """Return how many processes the kernel has ended because the group was full."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        try:
            words = [line.split() for line in self.folder.joinpath(name).read_text().splitlines()]
        except OSError:
            return 0
        return next((int(count) for word, count in words if word == "oom_kill"), 0)

    def remove(self) -> None:
        """Remove the group, once its processes have ended."""
        with suppress(OSError):
            self.folder.rmdir()

    def entering(self, command: list[str]) -> list[str]:
        """Return ``command`` so that it runs inside the group from its first instruction."""
        return ["/bin/sh", "-c", 'echo 0 > "$0" && exec "$@"', str(self.folder / "cgroup.procs"), *command]


def make_group(root: Path = Path("/")) -> MemoryGroup:
    """Return a new group below this process's own; a ``CapError`` says why there can be none.

    ``root`` is where ``proc`` and ``sys`` lie.
    """
    reasons = []
    for version, parent in _parents(root):
        try:
            return _make(parent, version)
        except OSError as error:
            reasons.append(f"{parent}: {error.strerror}")
    why = "; ".join(reasons) or "no memory controller is mounted here"
    raise CapError(f"no memory group can be made ({why})")


def _make(parent: Path, version: Literal[1, 2]) -> MemoryGroup:
    if version == 2 and "memory" not in parent.joinpath("cgroup.subtree_control").read_text().split():
        parent.joinpath("cgroup.subtree_control").write_text("+memory")
    folder = parent / f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    return MemoryGroup(folder, version)


def _parents(root: Path) -> Iterator[tuple[Literal[1, 2], Path]]:
    """Yield where a group may be made: below this process's group; in version 2 beside it too.

    There a group that holds processes passes no controller on to groups below it, unless it is the root.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield from ((1, folder) for folder in _folders(root, path, "cgroup", "memory"))
        elif not controllers:
            inside = list(_folders(root, path, "cgroup2", ""))
            yield from ((2, folder) for each in inside for folder in (each, each.parent))


def _folders(root: Path, path: str, system: str, option: str) -> Iterator[Path]:
    """Yield the folder of the group ``path`` in each hierarchy of that kind that is mounted."""
    for line in root.joinpath("proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        group, mount = before.split()[3:5]
        kind, _, options = after.split(maxsplit=2)
        if kind != system or (option and option not in options.split(",")):
            continue
        base = root / mount.lstrip("/")
        inside = base / os.path.relpath(path, group)
        offers_memory = option or "memory" in _read(inside / "cgroup.controllers").split()
        if Path(path).is_relative_to(group) and inside.is_dir() and offers_memory:
            yield inside


def _read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""
