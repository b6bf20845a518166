"""What the host can still give: the smaller of what the system has available and what the process's cgroups allow.

A container's limit isn't seen in ``/proc/meminfo``; a process that goes by it is killed. Limits nest: a group may hold
no more than any of the groups around it, in both versions of the interface (kernel documentation,
``admin-guide/cgroup-v2`` and ``cgroup-v1/memory``). What this process itself holds is counted as available:
a plan is the same whether it is made before or after heavy imports, and the process's own share is a stated term
of the budget instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class Host:
    """Host memory in bytes, as this process would find it had it allocated nothing.

    ``limit_bytes`` is the tightest cgroup limit, or null; ``available_bytes`` what the system and the groups leave.
    """

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None = None

    @classmethod
    def of_size(cls, count: int) -> Host:
        """Return a host of ``count`` bytes with nothing in it."""
        return cls(count, count)


@dataclass(frozen=True, slots=True)
class _Interface:
    """Where one version of the interface keeps what a group may hold and what it holds (anonymous memory)."""

    limit: str
    held: str


_V1 = _Interface("memory.limit_in_bytes", "total_rss")
_V2 = _Interface("memory.max", "anon")


def host_memory(root: Path = Path("/")) -> Host:
    """Return this machine's host memory. ``root`` is where ``proc`` and ``sys`` lie."""
    system = _table(root / "proc/meminfo")
    own = _table(root / "proc/self/status").get("RssAnon", 0) * 1024
    total, available = system["MemTotal"] * 1024, system["MemAvailable"] * 1024 + own
    limit: int | None = None
    for allowed, held in _groups(root):
        limit = allowed if limit is None else min(limit, allowed)
        available = min(available, allowed - max(0, held - own))
    return Host(total if limit is None else min(total, limit), max(0, min(available, total)), limit)


def _table(path: Path) -> dict[str, int]:
    """Return the ``name: number`` or ``name number`` lines of a file of the kernel, none where it isn't there."""
    found = {}
    for line in path.read_text().splitlines() if path.is_file() else ():
        words = line.replace(":", " ").split()
        if len(words) > 1 and words[1].isdigit():
            found[words[0]] = int(words[1])
    return found


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit and the anonymous bytes held of every limited memory group around this process."""
    membership = root / "proc/self/cgroup"
    for line in membership.read_text().splitlines() if membership.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        kind = _V1 if controllers else _V2
        for folder in _folders(root, kind, path):
            limit = folder / kind.limit
            text = limit.read_text().strip() if limit.is_file() else "max"
            if text.isdigit() and int(text) < _UNLIMITED:
                yield int(text), _table(folder / "memory.stat").get(kind.held, 0)


def _folders(root: Path, kind: _Interface, path: str) -> Iterator[Path]:
    """Yield the folder of the group ``path`` and those of the groups around it, as they are mounted here."""
    for mounted_group, mount in _mounts(root, kind):
        inside = Path(path).relative_to(mounted_group) if Path(path).is_relative_to(mounted_group) else Path()
        base = root / mount.lstrip("/")
        yield base
        for parts in range(1, len(inside.parts) + 1):
            yield base.joinpath(*inside.parts[:parts])


def _mounts(root: Path, kind: _Interface) -> Iterator[tuple[str, str]]:
    """Yield which group is mounted where, for the hierarchies of ``kind``."""
    for line in root.joinpath("proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        group, mount = before.split()[3:5]
        system, _, options = after.split(maxsplit=2)
        wanted = system == "cgroup2" if kind is _V2 else system == "cgroup" and "memory" in options.split(",")
        if wanted:
            yield group, mount
