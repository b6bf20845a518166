"""The memory for what is certain to be used: brought ahead in order, let go in order, so that it is a ring.

What lasts while other parts come and go has fixed places at the end of the ring, twice where there is room: then it is
brought ahead too while what lies there is in use. Experts that find no slots pass through it as well: what is brought
ahead leaves room for one of their parts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from offstage.stages.dispatch.transfer.arena import Arena
from offstage.stages.dispatch.transfer.link import Link
from offstage.stages.machine.aligned_memory import ALIGNMENT, align_up
from offstage.stages.plan.lasting_parts import LastingParts, place_lasting
from offstage.stages.units import DEVICE_ALIGNMENT

_SMALL_BYTES = 64 * 2**10
"""A norm's few KB are kept out of the way of large parts: between two of their regions they would cost room for one."""
_SMALL_ARENA_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class RingParts:
    """The parts that pass through a ring: their ``sizes`` by number, and what each takes of the ring, ``padded``.

    The ``small`` keep out of the way of the others, on the host in memory of their own. ``lasting`` has the places of
    those that last, and ``option`` is what the largest has that a forward decides to use.
    """

    sizes: Mapping[int, int]
    padded: Mapping[int, int]
    small: Collection[int]
    lasting: LastingParts[int]
    option: int

    @property
    def bytes(self) -> int:
        """What all of them take of the ring."""
        return sum(self.padded.values())

    @property
    def least(self) -> int:
        """What those that are there at once take of it, and the largest of all."""
        return max(self.lasting.least, *self.padded.values(), 0)


def alignment_of(link: Link) -> int:
    """Return where regions begin in the memory behind ``link``, in bytes."""
    return ALIGNMENT if link.in_place else DEVICE_ALIGNMENT


def ring_parts(
    link: Link, sizes: Mapping[int, int], *, callers: Mapping[int, Collection[str]], passing: Collection[int] = ()
) -> RingParts:
    """Return the parts of these ``sizes``, by their numbers, as what passes through a ring behind ``link``.

    ``callers`` has the modules whose calls use each part, as far as it may be there beside others. ``passing`` are
    those that a forward decides to use.
    """
    alignment = alignment_of(link)
    small = {part for part, size in sizes.items() if size <= _SMALL_BYTES and part not in passing}
    padded = {part: 0 if link.in_place and part in small else align_up(size, alignment) for part, size in sizes.items()}
    beside = {part: names for part, names in callers.items() if padded.get(part)}
    lasting = place_lasting(beside, padded, alignment=alignment)
    return RingParts(sizes, padded, small, lasting, max((sizes[part] for part in passing), default=0))


class Ring:
    """``room`` bytes behind ``link`` for ``parts``, as far as that is of use to them."""

    def __init__(self, link: Link, parts: RingParts, *, room: int) -> None:
        sizes, lasting = parts.sizes, parts.lasting
        self._sizes, self._small, self._option, self._link = sizes, parts.small, parts.option, link
        self._bytes = min(room, parts.bytes)
        self._small_bytes = min(_SMALL_ARENA_BYTES, sum(sizes[part] for part in parts.small))
        self.renew()
        assert self._arena is not None
        size = self._arena.size
        copies = 0 if lasting.bytes > size else 2 if lasting.least + lasting.bytes <= size else 1
        shifts = [copy * lasting.bytes for copy in range(copies)]
        self._places = {part: [place + shift for shift in shifts] for part, place in lasting.places.items() if copies}
        self._front = size - copies * lasting.bytes

    def renew(self) -> None:
        """Take other memory: in a process that was forked nobody fills what was lent."""
        self._arena: Arena[torch.Tensor] | None = Arena(self._link.memory(max(1, self._bytes)))
        self._small_arena = Arena(self._link.memory(self._small_bytes)) if self._link.in_place else None

    def take(self, part: int, *, ahead: bool = False, anywhere: bool = False) -> torch.Tensor | None:
        """Return memory for ``part``, or null if there is none free.

        What is taken ``ahead`` of use leaves room for a part that a forward decides to use. What has places of its own
        is taken ``anywhere`` once nothing that nobody uses is in the way there.
        """
        assert self._arena is not None
        if part in self._small and self._small_arena is not None:
            return self._small_arena.take(self._sizes[part])
        size, at_end, region = self._sizes[part], part in self._small, None
        if part in self._places and not anywhere:
            region = self._arena.take_at(self._places[part], size)
        else:  # where nothing has a place of its own, or else wherever it is free; the small as far behind as can be
            if self._places:
                region = self._arena.take(size, at_end=at_end, before=self._front)
            if region is None:
                region = self._arena.take(size, at_end=at_end)
        if ahead and self._option and self._arena.take(self._option, at_end=True) is None:
            return None
        return region

    def beyond(self, size: int) -> torch.Tensor:
        """Return ``size`` bytes outside of the ring; a ``BudgetError`` where an accelerator is full."""
        memory = self._link.memory(max(1, size))
        return memory.lend(0, memory.size)[0]

    def close(self) -> None:
        """Let go of the memory, once the link is closed."""
        self._arena = self._small_arena = None


def slot_bytes(groups: Sequence[int], certain: RingParts, *, room: int) -> int:
    """Return how much of ``room`` experts of these sizes, ``groups``, get beside ``certain`` parts, in bytes.

    The certain ones have all that is of use to them, or half. The experts have what is left, as far as they need it;
    none where that isn't enough for the largest part and the largest expert: then all share the memory.
    """
    if not groups or certain.least + max(groups) > room:
        return 0
    left = max(room - certain.bytes, room // 2)
    return min(sum(groups), max(max(groups), min(left, room - certain.least)))
