"""Control groups: which memory groups this process is in, and where the kernel shows them.

Linux has two interfaces for such groups (kernel documentation, ``cgroup-v1/memory`` and ``admin-guide/cgroup-v2``), and
a machine may have both mounted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Version = Literal[1, 2]


@dataclass(frozen=True, slots=True)
class Interface:
    """One version of the interface: the files of a group that say what it may hold, with swap, and which processes
    were ended for it, and what its ``memory.stat`` calls the anonymous memory that it holds.
    """

    version: Version
    limit: str
    swap: str
    events: str
    held: str


INTERFACES: dict[Version, Interface] = {
    1: Interface(1, "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.oom_control", "total_rss"),
    2: Interface(2, "memory.max", "memory.swap.max", "memory.events", "anon"),
}


@dataclass(frozen=True, slots=True)
class MountedGroup:
    """This process's memory group as one mount of the ``interface`` shows it: ``path`` below the folder ``mount``.

    The path is null where the mount shows another part of the hierarchy, as it may in a container.
    """

    interface: Interface
    mount: Path
    path: Path | None

    @property
    def folder(self) -> Path | None:
        """The group's own folder."""
        return None if self.path is None else self.mount / self.path

    @property
    def folders(self) -> Iterator[Path]:
        """The folders of the groups around it, from the mount's own on, and its own."""
        parts = self.path.parts if self.path is not None else ()
        return (self.mount.joinpath(*parts[:count]) for count in range(len(parts) + 1))


def memory_groups(root: Path = Path("/")) -> Iterator[MountedGroup]:
    """Yield this process's memory groups in the order of ``proc/self/cgroup``; ``root`` is where ``proc`` lies."""
    for line in read_lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        interface = INTERFACES[1 if controllers else 2]
        for group, mount in _mounts(root, interface.version):
            below = Path(path).relative_to(group) if Path(path).is_relative_to(group) else None
            yield MountedGroup(interface, root / mount.lstrip("/"), below)


def _mounts(root: Path, version: Version) -> Iterator[tuple[str, str]]:
    """Yield which group is mounted where, for the memory hierarchies of that version."""
    for line in read_lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        group, mount = before.split()[3:5]
        system, _, options = after.split(maxsplit=2)
        if system == ("cgroup2" if version == 2 else "cgroup") and (version == 2 or "memory" in options.split(",")):
            yield group, mount


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file of the kernel; none where it isn't there."""
    return path.read_text().splitlines() if path.is_file() else []
