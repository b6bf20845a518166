"""Memory caps: a group of processes that the kernel ends when it holds more than the plan allows.

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

from offstage.pipeline.cgroup_files import INTERFACES, Version, memory_groups, read_lines

KERNEL_BYTES = 32 * 2**20
"""What the kernel charges to a group beside its processes' own pages: page tables, stacks, file handles."""

_PREFIX = "offstage-"


class CapError(Exception):
    """This process may not cap memory here; the message says why."""


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """One group, by its folder in the interface of ``version``."""

    folder: Path
    version: Version

    def limit(self, count: int) -> None:
        """Allow ``count`` bytes from now on; a ``CapError`` where the group holds more already or it isn't granted."""
        interface = INTERFACES[self.version]
        path = self.folder / interface.limit
        try:
            path.write_text(str(count))
        except OSError as error:
            raise CapError(f"{path}: {error.strerror}") from error
        with suppress(OSError):  # a kernel without swap accounting has no such file
            swap = count if self.version == 1 else 0  # version 1 counts memory and swap together
            self.folder.joinpath(interface.swap).write_text(str(swap))

    def kills(self) -> int:
        """Return how many processes the kernel has ended because the group was full."""
        words = [line.split() for line in read_lines(self.folder / INTERFACES[self.version].events)]
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


def _make(parent: Path, version: Version) -> MemoryGroup:
    if version == 2 and "memory" not in parent.joinpath("cgroup.subtree_control").read_text().split():
        parent.joinpath("cgroup.subtree_control").write_text("+memory")
    folder = parent / f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    return MemoryGroup(folder, version)


def _parents(root: Path) -> Iterator[tuple[Version, Path]]:
    """Yield where a group may be made: below this process's group; in version 2 beside it too.

    There a group that holds processes passes no controller on to groups below it, unless it is the root.
    """
    for group in memory_groups(root):
        folder = group.folder
        if folder is None or not folder.is_dir():
            continue
        if group.interface.version == 1:
            yield 1, folder
        elif any("memory" in line.split() for line in read_lines(folder / "cgroup.controllers")):
            yield from ((2, folder), (2, folder.parent))
