"""Who had the processor while work went on: this process, or others that it had to wait for.

A figure of speed means little where other processes took the cores meanwhile. Linux's scheduler accounts for it: how
long each thread was ready to run and didn't (kernel documentation, ``scheduler/sched-stats``), and how long each core
worked, or was taken away by a hypervisor (``filesystems/proc``). Threads wait for each other too, so what was taken by
others is never more than the others worked.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from offstage.pipeline.environment import allowed_cores
from offstage.pipeline.memory_cgroups import read_lines

CONTENDED_SHARE = 0.1
"""Where at least this share of the time that its threads were ready to run was taken by others, a process was kept."""
SHARED_PART = 0.1
"""Where others computed for at least this part of what all cores could have, they took of memory and caches too."""
_SEEN_SECONDS = 0.05
"""The least that the system's account of cores tells from nothing: it has steps of a hundredth of a second."""
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_WORKING = slice(0, 3)  # user, nice and system; interrupts belong to nobody
_STOLEN = 7


@dataclass(frozen=True, slots=True)
class ProcessorUse:
    """The processor between two moments, all in seconds; what the system doesn't tell is null.

    ``cpu_seconds`` are those of all threads of this process together, and so are ``waited_seconds``, in which they were
    ready to run and didn't. ``others_seconds`` is what all other processes computed on the cores that this one may run
    on, but those that it started and that ended meanwhile; ``stolen_seconds`` is what a hypervisor took of these.
    """

    wall_seconds: float
    cpu_seconds: float
    waited_seconds: float | None = None
    others_seconds: float | None = None
    stolen_seconds: float | None = None

    @property
    def taken_share(self) -> float | None:
        """Which share of the time that its threads were ready to run was taken by others; null where nobody knows."""
        if self.waited_seconds is None or self.others_seconds is None:
            return None
        computed = self.cpu_seconds + self.others_seconds
        stolen = (self.stolen_seconds or 0.0) * self.cpu_seconds / computed if computed else 0.0
        taken = min(self.waited_seconds, self.others_seconds) + stolen
        return taken / (self.cpu_seconds + taken) if taken else 0.0

    @property
    def is_contended(self) -> bool | None:
        """Whether others took so much that figures of speed say more of them; null where nobody knows."""
        return None if self.taken_share is None else self.taken_share >= CONTENDED_SHARE

    @property
    def is_shared(self) -> bool | None:
        """Whether others computed so much that it tells in whatever is measured, be there cores enough for all; null
        where nobody knows.
        """
        if self.others_seconds is None or not self.wall_seconds:
            return None
        others = self.others_seconds + (self.stolen_seconds or 0.0)
        return others >= max(SHARED_PART * self.wall_seconds * len(allowed_cores()), _SEEN_SECONDS)

    def as_record(self) -> dict[str, float | bool | None]:
        """Return it as a record holds it."""
        rounded = {name: _rounded(getattr(self, name)) for name in (*self.__dataclass_fields__, "taken_share")}
        return {**rounded, "contended": self.is_contended}


@dataclass(frozen=True, slots=True)
class _Account:
    wall: float
    cpu: float
    ended: float
    waits: Mapping[str, tuple[int, int]]
    cores: tuple[float, float] | None


@dataclass(slots=True)
class ProcessorMeter:
    """Measures from when it is made; ``root`` is where ``proc`` and ``sys`` lie."""

    root: Path = Path("/")
    _began: _Account = field(init=False)

    def __post_init__(self) -> None:
        self._began = _now(self.root)

    def use(self) -> ProcessorUse:
        """Return what there was since."""
        then, now = self._began, _now(self.root)
        cpu = now.cpu - then.cpu
        others = stolen = waited = None
        if any(ran for ran, _ in now.waits.values()):  # else the kernel keeps no account
            before = {thread: count for thread, (_, count) in then.waits.items()}
            waited = sum(count - before.get(thread, 0) for thread, (_, count) in now.waits.items()) / 1e9
        if then.cores is not None and now.cores is not None:
            own = cpu + now.ended - then.ended
            others, stolen = max(0.0, now.cores[0] - then.cores[0] - own), now.cores[1] - then.cores[1]
        return ProcessorUse(
            wall_seconds=now.wall - then.wall,
            cpu_seconds=cpu,
            waited_seconds=waited,
            others_seconds=others,
            stolen_seconds=stolen,
        )


def _now(root: Path) -> _Account:
    return _Account(
        time.perf_counter(),
        time.process_time(),
        _of_ended(),
        _waits(root / "proc/self/task"),
        _cores(root / "proc/stat"),
    )


def _of_ended() -> float:
    """Return the processor's seconds of all processes that this one started, and that ended."""
    times = os.times()
    return times.children_user + times.children_system


def _waits(tasks: Path) -> dict[str, tuple[int, int]]:
    """Return for how many nanoseconds each thread ran, and was ready and didn't."""
    waits = {}
    for thread in tasks.iterdir() if tasks.is_dir() else ():
        with suppress(OSError, ValueError):  # it may have ended
            ran, waited, _ = map(int, thread.joinpath("schedstat").read_text().split())
            waits[thread.name] = ran, waited
    return waits


def _cores(path: Path) -> tuple[float, float] | None:
    """Return the seconds that the cores of this process worked so far, whoever for, and that were stolen of them."""
    allowed = {f"cpu{number}" for number in allowed_cores()}
    counts = [words[1:] for words in map(str.split, read_lines(path)) if words and words[0] in allowed]
    if not counts:
        return None
    working = sum(int(tick) for ticks in counts for tick in ticks[_WORKING])
    stolen = sum(int(ticks[_STOLEN]) for ticks in counts if len(ticks) > _STOLEN)
    return working / _TICKS, stolen / _TICKS


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
