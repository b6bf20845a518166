"""By which rule a kept expert gives up its slot to one that is wanted now: one small class a rule, all told the same.

The published evidence conflicts. LFU did better than LRU on Mixtral (arXiv 2511.05814); where routing is balanced over
hundreds of experts a fixed set of frequent ones lost to recency at every size (kekzl/imp, pull request 2061); neither
fits, says SpecMD (arXiv 2602.03921), since layers come in the same order in every pass. So there are those three, and
one of all of them, LFRU; ``python -m tests.benchmarks.eviction`` sets them beside each other and the optimum. There LRU
hits nothing with slots for less than a pass of experts, LFU loses to it where tokens are routed like the token before,
and LFRU is within a point of the best of the others, or up to eight above it, on every trace and at every size.

A rule is told what happens (``begin_pass``, ``begin_layer``, ``use``, ``forget``) and asked for a ``victim``. It is
asked for hundreds a token and thousands of experts may be kept, so none looks at all of them.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping
from heapq import heappop, heappush, heapreplace
from typing import Protocol

Expert = tuple[int, int]
"""The number of the experts module in order of execution, and the number of the expert in it."""

HALF_LIFE_PASSES = 32.0


class Eviction(Protocol):
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


class LeastFrequentlyUsed:
    """Gives up the expert with the fewest uses, of equals the one whose last use is longest ago; uses age.

    A use counts half after ``half_life_passes`` passes, so that experts of a text's beginning don't stay for ever (a
    decayed count is the CRF of Lee et al., LRFU, IEEE Transactions on Computers 50, 2001; llama.cpp's cache of experts
    uses one too). All counts shrink alike, so their order changes only by uses: what is stored is the logarithm of the
    count as it would be in pass 0. Uses are remembered beyond ``forget``. Of half-lives from 4 passes to none at all,
    32 was never a point below the best on a skewed trace, and up to 2 points above none on a recorded one.

    An expert's place in the heap is the one of some earlier use, at or before its true one, and is mended when it
    comes up: a use costs no heap operation.
    """

    def __init__(self, half_life_passes: float = HALF_LIFE_PASSES) -> None:
        self._half_life = half_life_passes
        self._passes = 0
        self._uses = 0
        self._ranks: dict[Expert, tuple[float, int]] = {}
        self._kept: set[Expert] = set()
        self._heap: list[tuple[tuple[float, int], Expert]] = []
        self._in_heap: set[Expert] = set()

    def begin_pass(self) -> None:
        """Let all earlier uses count a little less."""
        self._passes += 1

    def begin_layer(self, layer: int) -> None:
        """Layers all count alike."""

    def use(self, expert: Expert) -> None:
        """Count one use of ``expert``, and keep it."""
        self.count(expert)
        self.keep(expert)

    def count(self, expert: Expert) -> None:
        """Count one use of ``expert``, kept or not."""
        self._uses += 1
        count = self._passes / self._half_life
        if expert in self._ranks:
            low, high = sorted((count, self._ranks[expert][0]))
            count = high + math.log2(1 + 2 ** (low - high))
        self._ranks[expert] = (count, self._uses)

    def keep(self, expert: Expert) -> None:
        """Let ``expert``, which has been used before, be one that can be given up."""
        self._kept.add(expert)
        if expert not in self._in_heap:
            self._in_heap.add(expert)
            heappush(self._heap, (self._ranks[expert], expert))

    def forget(self, expert: Expert) -> None:
        """Keep ``expert`` no longer; its uses still count when it comes back."""
        self._kept.discard(expert)

    def victim(self, busy: Container[Expert]) -> Expert | None:
        """Return the expert with the fewest uses."""
        passed_over = []
        while (expert := self._fewest()) is not None and expert in busy:
            passed_over.append(heappop(self._heap))
        for entry in passed_over:
            heappush(self._heap, entry)
        return expert

    def _fewest(self) -> Expert | None:
        """Return the kept expert with the fewest uses, which is then on top of the heap."""
        while self._heap:
            rank, expert = self._heap[0]
            if expert not in self._kept:
                heappop(self._heap)
                self._in_heap.discard(expert)
            elif rank != self._ranks[expert]:
                heapreplace(self._heap, (self._ranks[expert], expert))
            else:
                return expert
        return None


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
"""Within a point of the best of the others, or above it, on every trace of ``python -m tests.benchmarks.eviction``."""


class LeastFrequentlyRecentlyUsed:
    """Gives up, of the experts that were passed over at their last chance, the one with the fewest uses, which age.

    Tokens near each other are routed alike, so what a layer used when it ran last is privileged, whatever its count;
    frequency decides among the rest, which no single pass tells apart. Only where all are privileged is one of those
    given up, as ``LeastStale`` does: of the layer that ran last. LFU alone gives up what came last, with few uses yet,
    before the next token may want it again.
    """

    def __init__(self) -> None:
        self._layer = -1
        self._privileged: dict[int, dict[Expert, None]] = {}
        self._others = LeastFrequentlyUsed()

    def begin_pass(self) -> None:
        """Begin again at the first layer."""
        self._layer = -1
        self._others.begin_pass()

    def begin_layer(self, layer: int) -> None:
        """Have what ``layer`` used when it ran before be privileged no longer."""
        if layer != self._layer:
            self._layer = layer
            for passed_over in self._privileged.pop(layer, {}):
                self._others.keep(passed_over)

    def use(self, expert: Expert) -> None:
        """Count one use of ``expert`` and privilege it."""
        self.begin_layer(expert[0])
        self._others.forget(expert)
        self._others.count(expert)
        self._privileged.setdefault(self._layer, {})[expert] = None

    def forget(self, expert: Expert) -> None:
        """Keep ``expert`` no longer; its uses still count when it comes back."""
        self._privileged.get(expert[0], {}).pop(expert, None)
        self._others.forget(expert)

    def victim(self, busy: Container[Expert]) -> Expert | None:
        """Return the expert with the fewest uses of those passed over, or a privileged one."""
        found = self._others.victim(busy)
        return found or next((expert for expert in self._by_next_chance() if expert not in busy), None)

    def _by_next_chance(self) -> Iterator[Expert]:
        """Yield the privileged experts, those first whose layer comes last."""
        last = max(self._privileged, default=-1)
        for layer in (*range(self._layer, -1, -1), *range(last, self._layer, -1)):
            yield from self._privileged.get(layer, ())


POLICIES: Mapping[str, Callable[[], Eviction]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "least_stale": LeastStale,
    DEFAULT: LeastFrequentlyRecentlyUsed,
}
