"""The staging memory in two: for parts that are certain to be used, and for those that a forward decides to use.

What is certain is a ring: brought ahead in order, let go in order. What is optional (the experts of a mixture) is
brought when it is called and stays while nothing else needs its place. In one memory each would be in the other's way:
what was read ahead would have to be given up, and be read again, for every expert that is called.

What lasts while other parts come and go has fixed places at the end of the ring, twice where there is room: then it is
brought ahead too while what lies there is in use.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Generic

from offstage.stages.dispatch.transfer.arena import Arena, Memory, Region
from offstage.stages.machine.aligned_memory import align_up
from offstage.stages.plan.lasting_parts import place_lasting


class Staging(Generic[Region]):
    """``room`` bytes for parts of these ``sizes``, made by ``allocate``.

    ``callers`` has the modules whose calls use each part, as far as it may be there beside others. The certain parts
    have all that is of use to them, or half; the ``optional`` ones, in groups that are used together, what is left, as
    far as they need it. Where that isn't enough for the largest part and the largest group, all share the memory, and
    ``kept`` is empty.
    """

    def __init__(
        self,
        allocate: Callable[[int], Memory[Region]],
        sizes: Sequence[int],
        *,
        optional: Sequence[Sequence[int]],
        callers: Mapping[int, Collection[str]],
        room: int,
        alignment: int,
    ) -> None:
        padded = [align_up(size, alignment) for size in sizes]
        parts = {part for group in optional for part in group}
        certain = [size for part, size in enumerate(padded) if part not in parts] or [0]
        groups = [sum(padded[part] for part in group) for group in optional]
        lasting = place_lasting(
            {part: names for part, names in callers.items() if part not in parts},
            dict(enumerate(padded)),
            alignment=alignment,
        )
        least = max(lasting.least, *certain)
        apart = _room_for_groups(groups, certain, least=least, room=room) if groups else 0
        if groups and not apart:
            lasting = place_lasting(callers, dict(enumerate(padded)), alignment=alignment)
        self._sizes = sizes
        self._option = 0 if apart else max((sizes[part] for part in parts), default=0)
        self._arena = Arena(allocate(min(room - apart, sum(certain) if apart else sum(padded))))
        self._options = Arena(allocate(apart)) if apart else self._arena
        self.kept = frozenset(parts) if apart else frozenset()
        size = self._arena.size
        copies = 0 if lasting.bytes > size else 2 if lasting.least + lasting.bytes <= size else 1
        shifts = [copy * lasting.bytes for copy in range(copies)]
        self._places = {part: [place + shift for shift in shifts] for part, place in lasting.places.items() if copies}
        self._front = size - copies * lasting.bytes

    def take(self, part: int, *, ahead: bool, at_end: bool = False, anywhere: bool = False) -> Region | None:
        """Return memory for ``part``, or null if there is none free.

        What is taken ``ahead`` of use leaves room for an optional part in what they share. What has places of its own
        is taken ``anywhere`` once nothing that nobody uses is in the way there.
        """
        arena = self._options if part in self.kept else self._arena
        if part in self._places and not anywhere:
            region = arena.take_at(self._places[part], self._sizes[part])
        else:
            region = self._take_front(arena, part, at_end=at_end)
        if ahead and self._option and arena.take(self._option, at_end=True) is None:
            return None
        return region

    def _take_front(self, arena: Arena[Region], part: int, *, at_end: bool) -> Region | None:
        """Return memory for ``part`` where nothing has a place of its own, or else wherever it is free."""
        size = self._sizes[part]
        if self._places and arena is self._arena:
            region = arena.take(size, at_end=at_end, before=self._front)
            if region is not None:
                return region
        return arena.take(size, at_end=at_end)


def _room_for_groups(groups: Sequence[int], certain: Sequence[int], *, least: int, room: int) -> int:
    """Return how much of ``room`` optional ``groups`` get beside ``certain`` parts, in bytes; none where all share.

    Of the certain ones ``least`` bytes are there at once.
    """
    if least + max(groups) > room:
        return 0
    left = max(room - sum(certain), room // 2)
    return min(sum(groups), max(max(groups), min(left, room - least)))
