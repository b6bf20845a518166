"""Memory caps: a group of processes that the kernel ends when it holds more than the plan allows.

A job's process is started inside its group, so that all it ever holds counts; the limit is set when its plan is known.
Page cache counts too, but the kernel takes it back before it ends anything. Swap is not allowed to help.

Linux has two interfaces for such groups (kernel documentation, ``cgroup-v1/memory`` and ``admin-guide/cgroup-v2``), and
a machine may have both mounted.
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
            controllers = parent / "cgroup.subtree_control"
            if version == 2 and "memory" not in controllers.read_text().split():
                controllers.write_text("+memory")
            folder = parent / f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}"
            folder.mkdir()
            return MemoryGroup(folder, version)
        except OSError as error:
            reasons.append(f"{parent}: {error.strerror}")
    why = "; ".join(reasons) or "no memory controller is mounted here"
    raise CapError(f"no memory group can be made ({why})")


def _parents(root: Path) -> Iterator[tuple[Version, Path]]:
    """Yield where a group may be made: below this process's group; in version 2 beside it too.

    There a group that holds processes passes no controller on to groups below it, unless it is the root.
    """
    for group in mounted_groups("memory", root):
        folder = group.folder
        if folder is None or not folder.is_dir():
            continue
        if group.interface.version == 1:
            yield 1, folder
        elif any("memory" in line.split() for line in read_lines(folder / "cgroup.controllers")):
            yield from ((2, folder), (2, folder.parent))


Version = Literal[1, 2]

_UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class Interface:
    """One version of the interface: the files of a group that say what it may hold, with swap, and which processes
    were ended for it, and what its ``memory.stat`` calls what it holds and can't give up: anonymous and shared memory.
    """

    version: Version
    limit: str
    swap: str
    events: str
    usage_keys: tuple[str, str]


INTERFACES: dict[Version, Interface] = {
    1: Interface(
        1, "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.oom_control", ("total_rss", "total_shmem")
    ),
    2: Interface(2, "memory.max", "memory.swap.max", "memory.events", ("anon", "shmem")),
}


@dataclass(frozen=True, slots=True)
class MountedGroup:
    """This process's group of a controller as one mount of that ``version`` shows it: ``path`` below ``mount``.

    The path is null where the mount shows another part of the hierarchy, as it may in a container.
    """

    version: Version
    mount: Path
    path: Path | None

    @property
    def interface(self) -> Interface:
        """What the files are called of a group that counts memory."""
        return INTERFACES[self.version]

    @property
    def folder(self) -> Path | None:
        """The group's own folder."""
        return None if self.path is None else self.mount / self.path

    @property
    def folders(self) -> Iterator[Path]:
        """The folders of the groups around it, from the mount's own on, and its own."""
        parts = self.path.parts if self.path is not None else ()
        return (self.mount.joinpath(*parts[:count]) for count in range(len(parts) + 1))


def mounted_groups(controller: str, root: Path = Path("/")) -> Iterator[MountedGroup]:
    """Yield the groups of ``controller`` that this process is in, in the order of ``proc/self/cgroup``.

    ``root`` is where ``proc`` lies.
    """
    for line in read_lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        version: Version = 1 if controllers else 2
        for group, mount in _mounts(root, controller, version):
            below = Path(path).relative_to(group) if Path(path).is_relative_to(group) else None
            yield MountedGroup(version, root / mount.lstrip("/"), below)


def _mounts(root: Path, controller: str, version: Version) -> Iterator[tuple[str, str]]:
    """Yield which group is mounted where, for the hierarchies of that version that have the ``controller``."""
    for line in read_lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        group, mount = before.split()[3:5]
        system, _, options = after.split(maxsplit=2)
        if system == ("cgroup2" if version == 2 else "cgroup") and (version == 2 or controller in options.split(",")):
            yield group, mount


def memory_limits(root: Path = Path("/")) -> Iterator[tuple[int, MountedGroup, Path]]:
    """Yield the limit in bytes of every limited memory group around this process, with the group and its folder."""
    for group in mounted_groups("memory", root):
        for folder in group.folders:
            (text,) = read_lines(folder / group.interface.limit) or ["max"]
            if text.isdigit() and int(text) < _UNLIMITED:
                yield int(text), group, folder


def core_quota(root: Path = Path("/")) -> float | None:
    """Return how many cores' time the tightest of this process's groups allows, null where none limits it."""
    quotas = [_quota(folder, group.version) for group in mounted_groups("cpu", root) for folder in group.folders]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(folder: Path, version: Version) -> float | None:
    if version == 2:
        words = " ".join(read_lines(folder / "cpu.max")).split()
    else:
        words = [line for name in ("quota", "period") for line in read_lines(folder / f"cpu.cfs_{name}_us")]
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdigit() else None


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file of the kernel; none where it isn't there."""
    return path.read_text().splitlines() if path.is_file() else []
