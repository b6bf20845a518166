"""Rules of eviction that runs don't use, for ``tests/benchmarks/eviction.py`` to set beside the one that they do."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Protocol

from offstage.stages.dispatch.experts.eviction import HALF_LIFE_PASSES, Eviction, Expert, FrequencyRanks


class Rule(Protocol):
    """What keeps experts needs to know which to give up; an expert is kept from its first ``use`` to ``forget``."""

    def begin_pass(self) -> None:
        """A forward of the model begins."""

    def begin_layer(self, layer: int) -> None:
        """The experts of ``layer`` are called; which of them, each ``use`` says."""

    def use(self, expert: Expert) -> None:
        """``expert`` is used now; it is in a slot, or about to be brought into one."""

    def forget(self, expert: Expert) -> None:
        """``expert`` lies in no slot any more; nothing happens where it lay in none."""

    def victim(self, busy: Container[Expert]) -> Expert | None:
        """Return the kept expert, not in ``busy``, to give up next; null if all are busy. It stays until ``forget``."""


class LeastRecentlyUsed:
    """Gives up the expert whose last use is longest ago: tokens near each other are routed alike."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Expert, None] = OrderedDict()

    def begin_pass(self) -> None:
        """Only the order of uses counts here, not where passes begin."""

    def begin_layer(self, layer: int) -> None:
        """Nor where layers do."""

    def use(self, expert: Expert) -> None:
        """Make ``expert`` the last to be given up."""
        self._kept[expert] = None
        self._kept.move_to_end(expert)

    def forget(self, expert: Expert) -> None:
        """Keep ``expert`` no longer."""
        self._kept.pop(expert, None)

    def victim(self, busy: Container[Expert]) -> Expert | None:
        """Return the expert whose last use is longest ago."""
        return next((expert for expert in self._kept if expert not in busy), None)


class LeastFrequentlyUsed(FrequencyRanks):
    """Gives up the expert with the fewest uses, of equals the one whose last use is longest ago."""

    def __init__(self, half_life_passes: float = HALF_LIFE_PASSES) -> None:
        super().__init__(half_life_passes)

    def begin_layer(self, layer: int) -> None:
        """Layers all count alike."""

    def use(self, expert: Expert) -> None:
        """Count one use of ``expert``, and keep it."""
        self.count(expert)
        self.keep(expert)


class LeastStale:
    """Gives up what was passed over most often, of equals what can be wanted again last; from SpecMD, as we read it.

    An expert's chance comes when its layer runs. One that was passed over at its last chances is stale, the more the
    more often. Of those passed over equally often, the one whose layer ran last has its next chance last, a whole pass
    from now, while one of the next layer may be wanted at once: it is what Belady's rule would do with layers in a
    cycle. LRU does the opposite among those equals: it gives up the layers just ahead, so that slots for less than a
    pass of experts never hit.

    Kept experts lie in groups of one last use, (pass, layer). In order of time, the oldest groups down to the present
    layer's place in a pass are those passed over equally often; they go from their youngest to their oldest.
    """

    def __init__(self) -> None:
        self._now = (0, 0)
        self._last_uses: dict[Expert, tuple[int, int]] = {}
        self._groups: dict[tuple[int, int], dict[Expert, None]] = {}
        self._times: list[tuple[int, int]] = []

    def begin_pass(self) -> None:
        """Begin again at the first layer."""
        self._now = (self._now[0] + 1, -1)

    def begin_layer(self, layer: int) -> None:
        """Pass over what ``layer`` used before."""
        self._now = (self._now[0], layer)

    def use(self, expert: Expert) -> None:
        """Put ``expert`` among those of this pass and its layer, which is the present one."""
        self.forget(expert)
        self.begin_layer(expert[0])
        self._last_uses[expert] = self._now
        if self._now not in self._groups:
            self._groups[self._now] = {}
            insort(self._times, self._now)
        self._groups[self._now][expert] = None

    def forget(self, expert: Expert) -> None:
        """Keep ``expert`` no longer."""
        time = self._last_uses.pop(expert, None)
        if time is None:
            return
        del self._groups[time][expert]
        if not self._groups[time]:
            del self._groups[time]
            del self._times[bisect_right(self._times, time) - 1]

    def victim(self, busy: Container[Expert]) -> Expert | None:
        """Return the expert that was passed over most often."""
        return next((expert for expert in self._in_order() if expert not in busy), None)

    def _in_order(self) -> Iterator[Expert]:
        """Yield the kept experts in the order in which they are given up."""
        _, layer = self._now
        begin = 0
        while begin < len(self._times):
            oldest, first_layer = self._times[begin]
            end = bisect_right(self._times, (oldest if first_layer <= layer else oldest + 1, layer))
            for position in reversed(range(begin, end)):
                yield from self._groups[self._times[position]]
            begin = end


DEFAULT = "lfru"
"""What runs use."""

POLICIES: Mapping[str, Callable[[], Rule]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "least_stale": LeastStale,
    DEFAULT: Eviction,
}
