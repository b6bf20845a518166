"""Links and computing in a time that is only counted, for tests of what waits for what, and for how long.

A copy takes as many seconds as its layer has bytes over the link's rate, and links work at once; a read takes the
storage that all of them share. Nothing here depends on the machine's own time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from offstage.stages.dispatch.streaming.lookahead import Lookahead
from offstage.stages.dispatch.transfer.carrier import Delivery, Traffic

from offstage.stages.dispatch.transfer.arena import Arena


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


class VirtualCarrier:
    """Brings ``count`` layers to ``device``, of which ``room`` fit at once."""

    kept: Collection[int] = ()

    def __init__(self, machine: Machine, device: int, count: int, room: int) -> None:
        self.sizes = self.streamed = self.carried = [1] * count
        self._machine, self._device = machine, device
        self._arena: Arena[Span] = Arena(VirtualMemory(room))

    def take(self, part: int, *, ahead: bool = False) -> Span | None:
        return self._arena.take(1)

    def beyond(self, part: int) -> Span:
        raise AssertionError("what is let go makes room for what comes")

    def bring(self, part: int, delivery: Delivery[Span]) -> None:
        arrival: Future[float] = Future()
        arrival.set_result(self._machine.copy(self._device))
        delivery.arriving.append(arrival)

    def abandon(self, arrived: Iterable[Future[Any]]) -> None:
        pass

    def wait(self, delivery: Delivery[Span]) -> None:
        self._machine.now = max([self._machine.now, *(arrival.result() for arrival in delivery.arriving)])

    def views(self, part: int, delivery: Delivery[Span]) -> list[torch.Tensor]:
        return []

    def close(self) -> None:
        pass


def seconds_per_pass(
    computes: Sequence[int], *, room: int, computing: float = 0.0, storage_seconds: float = 0.0, passes: int = 8
) -> float:
    """Return how long a pass takes, once it goes as those before, through layers that these devices compute.

    Each has room for so many layers at once; each layer is ``computing`` for so many seconds.
    """
    machine, traffic = Machine(storage_seconds), Traffic()
    numbers = [computes[:place].count(device) for place, device in enumerate(computes)]
    ahead = {
        device: Lookahead(
            VirtualCarrier(machine, device, computes.count(device), room),
            range(computes.count(device)),
            traffic=traffic,
            device=device,
        )
        for device in dict.fromkeys(computes)
    }
    ends = []
    for _ in range(passes):
        for lookahead in ahead.values():
            lookahead.begin_pass()
        for device, number in zip(computes, numbers, strict=True):
            ahead[device].take(number)
            machine.now += computing
            ahead[device].let_go(number)
        for lookahead in ahead.values():
            lookahead.end_pass()
        ends.append(machine.now)
    return ends[-1] - ends[-2]
