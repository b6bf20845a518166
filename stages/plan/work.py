"""What a request takes beside the model's weights, in bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from offstage.stages.plan.cache_ledger import BlockCache, cache_bytes
from offstage.stages.units import CPU


@dataclass(frozen=True, slots=True)
class Work:
    """What a request takes on the device that computes a layer, in bytes: activations, and what blocks keep in caches.

    ``scratch_bytes`` are what the host's kernels take beside them, ``result_bytes`` what the host keeps to the end,
    and ``assistant_bytes`` what a second model takes on the main device. ``library_bytes`` are those of libraries that
    the host's process has for this model alone. ``learning_bytes`` are what a training keeps from step to step of the
    weights that learn; ``offloaded_bytes`` of an accelerator's activations wait on the host.
    """

    activation_bytes: int
    scratch_bytes: int = 0
    result_bytes: int = 0
    assistant_bytes: int = 0
    library_bytes: int = 0
    learning_bytes: int = 0
    offloaded_bytes: int = 0
    caches: tuple[BlockCache, ...] = ()

    @property
    def cache_bytes(self) -> int:
        """The most that all caches take at once."""
        return sum(cache_bytes(self.caches, lambda _: CPU).values())

    @property
    def bytes(self) -> int:
        """All of it."""
        parts: Iterable[int] = (getattr(self, name) for name in _PARTS)
        return self.cache_bytes + sum(parts)


_PARTS = tuple(one.name for one in fields(Work) if one.name != "caches")


def most(works: Iterable[Work]) -> Work:
    """Return what the one of ``works`` takes that takes the most, of each part."""
    works = list(works)
    largest = max(works, key=lambda one: one.cache_bytes)
    return replace(largest, **{name: max(getattr(one, name) for one in works) for name in _PARTS})
