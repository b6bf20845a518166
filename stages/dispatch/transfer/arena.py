"""The staging memory: allocated once, lent in regions, taken back when nothing uses a region any more.

A region is free again when the last tensor that views it is gone, not when a hook says so: a module may hand out a
view of its weight, and a traceback may hold one. What is still seen is never written over.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from offstage.stages.machine.aligned_memory import (
    ALIGNMENT,
    Bytes,
    align_up,
    outside_inference,
    private_memory,
    with_huge_pages,
)

Region = TypeVar("Region")
Lent = TypeVar("Lent", covariant=True)


class Memory(Protocol[Lent]):
    """Memory of ``size`` bytes whose regions begin at multiples of ``alignment``."""

    @property
    def size(self) -> int:
        """How much there is, in bytes."""

    @property
    def alignment(self) -> int:
        """Where regions may begin, in bytes."""

    def lend(self, begin: int, length: int) -> tuple[Lent, object]:
        """Return the region at ``begin``, and an object that lives exactly as long as anything views the region."""


def pages(size: int) -> Bytes:
    """Return ``size`` bytes of private memory, rounded up to whole pages, which are huge where there are such."""
    return np.frombuffer(with_huge_pages(private_memory(align_up(max(size, 1)))), np.uint8)


class HostMemory:
    """``size`` bytes of the host, or some more, as ``allocate`` gives them: it may count them, or tell a device."""

    def __init__(self, size: int, allocate: Callable[[int], Bytes] = pages, *, alignment: int = ALIGNMENT) -> None:
        self._bytes = allocate(size)
        self.size, self.alignment = self._bytes.nbytes, alignment

    def lend(self, begin: int, length: int) -> tuple[torch.Tensor, object]:
        """Return the region at ``begin``: a tensor with a storage of its own, which keeps the array alive."""
        region = self._bytes[begin : begin + length]
        with outside_inference():  # or no other thread could copy into it
            return torch.frombuffer(region, dtype=torch.uint8), region


class _Span(NamedTuple):
    begin: int
    end: int


class Arena(Generic[Region]):
    """Lends regions of ``memory``, taken next-fit, so in order of use it is a ring.

    Not safe to take from in two threads at once; regions may be let go in any thread.
    """

    def __init__(self, memory: Memory[Region]) -> None:
        self._memory = memory
        self._busy: list[_Span] = []  # sorted
        self._next = 0
        self._gone: deque[_Span] = deque()
        self._no_room_for = memory.size + 1  # bytes that no gap had when one was last looked for
        self._watches: dict[_Span, weakref.ref[object]] = {}

    @property
    def size(self) -> int:
        """The bytes of the memory."""
        return self._memory.size

    def take(self, size: int, *, at_end: bool = False, before: int | None = None) -> Region | None:
        """Return a region of ``size`` bytes, rounded up to the alignment, or null if none is free.

        It is taken back once every view of it is gone. ``at_end`` asks for the last gap that will do instead of the
        next: what is small and stays long leaves the others their room in one piece there. ``before`` is where the
        region ends at the latest.
        """
        self._collect()
        size = max(size, 1)
        if size >= self._no_room_for:
            return None
        end = self.size if before is None else before
        begin = self._find_last(size, end) if at_end else self._find(size, end)
        if begin is None:
            self._no_room_for = size if before is None else self._no_room_for
            return None
        region = self._lend(begin, size)
        if not at_end:
            self._next = begin + align_up(size, self._memory.alignment)
        return region

    def take_at(self, distances: Iterable[int], size: int) -> Region | None:
        """Return a region of ``size`` bytes that begins one of these ``distances`` before the end, the first that is
        free, or null.

        The region is aligned, and as much nearer to the beginning.
        """
        self._collect()
        alignment = self._memory.alignment
        places = ((self.size - distance) // alignment * alignment for distance in distances)
        begin = next((place for place in places if self._is_free(_Span(place, place + size))), None)
        return None if begin is None else self._lend(begin, max(size, 1))

    def _lend(self, begin: int, size: int) -> Region:
        length = align_up(size, self._memory.alignment)
        span = _Span(begin, min(begin + length, self.size))
        region, watched = self._memory.lend(span.begin, span.end - span.begin)
        insort(self._busy, span)
        gone = self._gone
        self._watches[span] = weakref.ref(watched, lambda _ref: gone.append(span))
        return region

    @property
    def used(self) -> int:
        """Bytes that are lent out now."""
        self._collect()
        return sum(span.end - span.begin for span in self._busy)

    def _is_free(self, span: _Span) -> bool:
        """Return whether nothing is lent of ``span``, and all of it is there."""
        place = bisect_left(self._busy, span)
        before = self._busy[place - 1].end if place else 0
        after = self._busy[place].begin if place < len(self._busy) else self.size
        return before <= span.begin and span.end <= after

    def _find(self, size: int, end: int) -> int | None:
        """Return where a gap of ``size`` bytes begins: the first at or after the last region taken, else any."""
        place = bisect_left(self._busy, (self._next,))
        begin = max(self._busy[place - 1].end, self._next) if place else self._next
        gap = self._first_gap(size, end, place, begin)
        return gap if gap is not None else self._first_gap(size, end, 0, 0)

    def _first_gap(self, size: int, end: int, place: int, begin: int) -> int | None:
        """Return where the first gap of ``size`` bytes before ``end`` begins, from ``begin`` on, which is before the
        busy span at ``place``.
        """
        for busy in self._busy[place:] if place else self._busy:
            if min(busy.begin, end) - begin >= size:
                return begin
            begin = busy.end
        return begin if end - begin >= size else None

    def _find_last(self, size: int, end: int) -> int | None:
        """Return the last aligned place in the last gap that has ``size`` bytes, before ``end``."""
        after = self.size
        for busy in [*reversed(self._busy), _Span(0, 0)]:
            start = (min(after, end) - size) // self._memory.alignment * self._memory.alignment
            if start >= busy.end:
                return start
            after = busy.begin
        return None

    def _collect(self) -> None:
        while self._gone:
            self._no_room_for = self.size + 1
            span = self._gone.popleft()
            del self._busy[bisect_left(self._busy, span)]
            del self._watches[span]
