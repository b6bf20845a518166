"""The staging memory in two: for parts that are certain to be used, and for those that a forward decides to use.

What is certain is a ring: brought ahead in order, let go in order. What is optional (the experts of a mixture) is
brought when it is called and stays while nothing else needs its place. In one memory each would be in the other's way:
what was read ahead would have to be given up, and be read again, for every expert that is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic

from stages.dispatch.transfer.arena import Arena, Memory, Region
from stages.machine.aligned_memory import align_up


class Staging(Generic[Region]):
    """``room`` bytes for parts of these ``sizes``, made by ``allocate``.

    The certain parts have all that is of use to them, or half; the ``optional`` ones, in groups that are used together,
    what is left, as far as they need it. Where that isn't enough for the largest part and the largest group, all share
    the memory, and ``kept`` is empty.
    """

    def __init__(
        self,
        allocate: Callable[[int], Memory[Region]],
        sizes: Sequence[int],
        *,
        optional: Sequence[Sequence[int]],
        room: int,
        alignment: int,
    ) -> None:
        padded = [align_up(size, alignment) for size in sizes]
        parts = {part for group in optional for part in group}
        certain = [size for part, size in enumerate(padded) if part not in parts] or [0]
        groups = [sum(padded[part] for part in group) for group in optional]
        apart = _room_for_groups(groups, certain, room) if groups else 0
        self._sizes = sizes
        self._option = 0 if apart else max((sizes[part] for part in parts), default=0)
        self._arena = Arena(allocate(min(room - apart, sum(certain) if apart else sum(padded))))
        self._options = Arena(allocate(apart)) if apart else self._arena
        self.kept = frozenset(parts) if apart else frozenset()

    def take(self, part: int, *, ahead: bool, at_end: bool = False) -> Region | None:
        """Return memory for ``part``, or null if there is none free.

        What is taken ``ahead`` of use leaves room for an optional part in what they share.
        """
        arena = self._options if part in self.kept else self._arena
        region = arena.take(self._sizes[part], at_end=at_end)
        if ahead and self._option and arena.take(self._option, at_end=True) is None:
            return None
        return region


def _room_for_groups(groups: Sequence[int], certain: Sequence[int], room: int) -> int:
    """Return how much of ``room`` optional ``groups`` get beside ``certain`` parts, in bytes; none where all share."""
    if max(certain) + max(groups) > room:
        return 0
    left = max(room - sum(certain), room // 2)
    return min(sum(groups), max(max(groups), min(left, room - max(certain))))
