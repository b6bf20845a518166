"""Links and computing in a time that is only counted, for tests of what waits for what, and for how long.

A copy takes as many seconds as its layer has bytes over the link's rate, and links work at once; a read takes the
storage that all of them share. Nothing here depends on the machine's own time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from offstage.stages.dispatch.streaming.weight_cache import WeightCache
from offstage.stages.dispatch.transfer.arena import Arena
from offstage.stages.dispatch.transfer.mover import Transfer
from offstage.stages.dispatch.transfer.part_layout import PartLayout


class Span:
    """A stretch of memory that isn't there."""


class VirtualMemory:
    """Memory that isn't there, of ``size`` layers."""

    alignment = 1

    def __init__(self, size: int) -> None:
        self.size = size

    def lend(self, begin: int, length: int) -> tuple[Span, object]:
        span = Span()
        return span, span


@dataclass
class Machine:
    """The time in seconds, and when each link, and the storage that they share, will have done what was asked of it.

    A layer takes a link one second, and the storage ``storage_seconds``.
    """

    storage_seconds: float = 0.0
    now: float = 0.0
    stored: float = 0.0
    copied: dict[int, float] = field(default_factory=dict)

    def copy(self, device: int) -> float:
        """Return when a layer that is asked for now will be on ``device``."""
        self.stored = max(self.stored, self.now) + self.storage_seconds
        begins = max(self.copied.get(device, 0.0), self.stored if self.storage_seconds else self.now)
        self.copied[device] = begins + 1
        return self.copied[device]


class VirtualMover:
    """Brings layers to ``device``."""

    def __init__(self, machine: Machine, device: int) -> None:
        self._machine, self._device = machine, device

    def bytes_of(self, layout: PartLayout) -> tuple[int, int]:
        return layout.size, layout.size

    def count_use(self, at_rest: int, carried: int) -> None:
        pass

    def fetch(self, layout: PartLayout, transfer: Transfer) -> None:
        transfer.asked.append(self._machine.copy(self._device))

    def wait(self, transfers: Iterable[Transfer], _what: str) -> None:
        self._machine.now = max([self._machine.now, *(arrival for each in transfers for arrival in each.arrive())])

    def abandon(self, transfer: Transfer) -> None:
        transfer.region = None


class VirtualRing:
    """Memory for ``room`` layers."""

    def __init__(self, room: int) -> None:
        self._arena: Arena[Span] = Arena(VirtualMemory(room))

    def take(self, part: int, *, ahead: bool = False, anywhere: bool = False) -> Span | None:
        return self._arena.take(1)

    def beyond(self, size: int) -> Span:
        raise AssertionError("what is let go makes room for what comes")


def seconds_per_pass(
    computes: Sequence[int], *, room: int, computing: float = 0.0, storage_seconds: float = 0.0, passes: int = 8
) -> float:
    """Return how long a pass takes, once it goes as those before, through layers that these devices compute.

    Each has room for so many layers at once; each layer is ``computing`` for so many seconds.
    """
    machine = Machine(storage_seconds)
    numbers = [computes[:place].count(device) for place, device in enumerate(computes)]
    ahead = {
        device: WeightCache(
            [PartLayout((), 1)] * computes.count(device),
            VirtualMover(machine, device),
            VirtualRing(room),
            range(computes.count(device)),
        )
        for device in dict.fromkeys(computes)
    }
    ends = []
    for _ in range(passes):
        for cache in ahead.values():
            cache.begin_pass()
        for device, number in zip(computes, numbers, strict=True):
            ahead[device].acquire(number)
            machine.now += computing
            ahead[device].release(number)
        for cache in ahead.values():
            cache.end_pass()
        ends.append(machine.now)
    return ends[-1] - ends[-2]
