"""Where saved bytes go and come back from; each target's own way is a ``Swap``.

Bytes that are put away may still be on their way out while the caller goes on: until then their source must stay as it
is. And they are fetched ahead of use, so what is asked for and what is there are two things.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Generic, Protocol, TypeVar

import torch

from offstage.stages.dispatch.transfer.arena import Arena, Memory
from offstage.stages.dispatch.transfer.trace import Trace

Lent = TypeVar("Lent")
_LEAST_BYTES = 2**20
_IDLE_PASSES = 8
"""After how many passes memory that isn't used is given back: to register it again takes longer than a pass."""


def span(trace: Trace | None, way: str, category: str, size: int) -> AbstractContextManager[None]:
    """Return a context whose time is in ``trace`` as activations that go a ``way``: out or back."""
    return trace.span(f"activations {way}", category, bytes=size) if trace else nullcontext()


class Fetch(Protocol):
    """Bytes on their way back."""

    def finish(self) -> None:
        """Have all that is computed from now on find them there; finishing twice does nothing."""


class Away(Protocol):
    """Bytes that were put away; their room is free again when this object is gone."""

    @property
    def leaving(self) -> bool:
        """Whether the source is still needed."""

    def settle(self) -> None:
        """Have all that is computed from now on begin after the source was copied, so that it may be let go."""

    def fetch(self, target: torch.Tensor) -> Fetch:
        """Start filling ``target``, a room of the same swap, or the first bytes of one."""


class Swap(Protocol):
    """Puts bytes of one device away."""

    def put(self, source: torch.Tensor, trace: Trace | None) -> Away:
        """Put the bytes ``source`` (flat, uint8) away; ``trace`` gets what that takes, and what fetching them does."""

    def room(self, size: int) -> torch.Tensor:
        """Return ``size`` bytes of the device, flat; a ``BudgetError`` where it is full."""

    def trim(self) -> None:
        """Give back what hasn't been used for a while; called at the end of each pass."""


class GrowingArena(Generic[Lent]):
    """Lends regions of as many memories as are needed, each as large as all before it.

    Regions are used again and again: passes that save the same take the same.
    """

    def __init__(self) -> None:
        self._arenas: list[Arena[Lent]] = []
        self._idle: list[int] = []  # of each, for how many passes nothing was in it

    @property
    def size(self) -> int:
        """The bytes of all memories."""
        return sum(arena.size for arena in self._arenas)

    def take(self, size: int) -> Lent | None:
        """Return a region of ``size`` bytes or a little more, null if there is none free: then ``grow`` helps."""
        taken = (region for arena in self._arenas if (region := arena.take(size)) is not None)
        return next(taken, None)

    def wanted(self, size: int) -> int:
        """Return how large a memory should be that is added since ``size`` bytes found no room."""
        return max(size, self.size, _LEAST_BYTES)

    def grow(self, memory: Memory[Lent]) -> None:
        """Lend from ``memory`` too."""
        self._arenas.append(Arena(memory))
        self._idle.append(0)

    def trim(self) -> None:
        """Let go of memories that nothing lay in at the ends of several passes, of which this is one."""
        idle = [0 if arena.used else before + 1 for arena, before in zip(self._arenas, self._idle, strict=True)]
        kept = [(arena, count) for arena, count in zip(self._arenas, idle, strict=True) if count < _IDLE_PASSES]
        self._arenas, self._idle = [arena for arena, _ in kept], [count for _, count in kept]
