"""By which rule a kept expert gives up its slot to one that is wanted now: LFRU, by recency first, then by frequency.

The published evidence conflicts. LFU did better than LRU on Mixtral (arXiv 2511.05814); where routing is balanced over
hundreds of experts a fixed set of frequent ones lost to recency at every size (kekzl/imp, pull request 2061); neither
fits, says SpecMD (arXiv 2602.03921), since layers come in the same order in every pass. This rule is of all of them:
``python -m tests.benchmarks.eviction`` sets it beside those and the optimum, and it is within a point of the best of
them, or up to eight above it, on every trace and at every size. LRU hits nothing there with slots for less than a pass
of experts, and LFU loses to it where tokens are routed like the token before.

It is asked for hundreds of victims a token and thousands of experts may be kept, so it never looks at all of them.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from heapq import heappop, heappush, heapreplace

Expert = tuple[int, int]
"""The number of the experts module in order of execution, and the number of the expert in it."""

HALF_LIFE_PASSES = 32.0


class FrequencyRanks:
    """Ranks experts by their uses: gives up the one with the fewest, of equals the one used longest ago; uses age.

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


class Eviction:
    """Gives up, of the experts that were passed over at their last chance, the one with the fewest uses, which age.

    Tokens near each other are routed alike, so what a layer used when it ran last is privileged, whatever its count;
    frequency decides among the rest, which no single pass tells apart. Only where all are privileged is one of those
    given up: of the layer that ran last, whose next chance is a whole pass from now. LFU alone gives up what came last,
    with few uses yet, before the next token may want it again. It is told what happens, and asked for a ``victim``; an
    expert is kept from its first ``use`` to ``forget``.
    """

    def __init__(self) -> None:
        self._layer = -1
        self._privileged: dict[int, dict[Expert, None]] = {}
        self._others = FrequencyRanks()

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
        chosen = self._others.victim(busy)
        return chosen or next((expert for expert in self._by_next_chance() if expert not in busy), None)

    def _by_next_chance(self) -> Iterator[Expert]:
        """Yield the privileged experts, those first whose layer comes last."""
        last = max(self._privileged, default=-1)
        for layer in (*range(self._layer, -1, -1), *range(last, self._layer, -1)):
            yield from self._privileged.get(layer, ())
