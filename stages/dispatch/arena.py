"""The staging memory: allocated once, lent in regions, taken back when nothing uses a region any more.

A region is free again when the last tensor that views it is gone, not when a hook says so: a module may hand out a
view of its weight, and a traceback may hold one. What is still seen is never written over.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stages.shard_load.memory import align_up, private_memory, with_huge_pages

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Span:
    begin: int
    end: int


class Arena:
    """``size`` bytes of page-aligned private memory. Regions are taken next-fit, so in order of use it is a ring.

    Not safe to take from in two threads at once; regions may be let go in any thread.
    """

    def __init__(self, size: int) -> None:
        self.size = align_up(max(size, 1))
        self._memory = with_huge_pages(private_memory(self.size))
        self._busy: list[_Span] = []  # sorted
        self._next = 0
        self._gone: deque[_Span] = deque()
        self._watches: dict[_Span, weakref.ref[Bytes]] = {}

    def take(self, size: int) -> Bytes | None:
        """Return a region of ``size`` bytes (aligned, length a multiple of the alignment), or null if none is free.

        It is taken back once the array and every view of it are gone.
        """
        self._collect()
        length = align_up(max(size, 1))
        begin = self._find(length)
        if begin is None:
            return None
        span = _Span(begin, begin + length)
        self._busy.append(span)
        self._busy.sort(key=lambda busy: busy.begin)
        self._next = span.end
        region = np.frombuffer(self._memory, np.uint8, length, begin)
        gone = self._gone
        self._watches[span] = weakref.ref(region, lambda _ref: gone.append(span))
        return region

    @property
    def used(self) -> int:
        """Bytes that are lent out now."""
        self._collect()
        return sum(span.end - span.begin for span in self._busy)

    def _find(self, length: int) -> int | None:
        """Return where a gap of ``length`` bytes begins: the first at or after the last region taken, else any."""
        gaps, begin = [], 0
        for span in [*self._busy, _Span(self.size, self.size)]:
            gaps.append((begin, span.begin))
            begin = span.end
        starts = [(max(begin, self._next), end) for begin, end in gaps] + gaps
        return next((start for start, end in starts if end - start >= length), None)

    def _collect(self) -> None:
        while self._gone:
            span = self._gone.popleft()
            self._busy.remove(span)
            del self._watches[span]
