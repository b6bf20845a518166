"""How often guesses of what a router will choose come true, and which of them are worth reading ahead.

A guess is a list of experts, those first that the router is surest of. By their layers and their places there they come
true more or less often: of a small mixture that learnt for minutes, the first of 4 choices in 37 of 100 passes in the
second layer, and in nearly all from the fourth on; the last in 18, and in 61 to 71.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

from offstage.stages.dispatch.experts.eviction import Expert

WORTH = 0.9
"""How often a place must have come true of late. What comes to nothing is read beyond what plans foresee, and they are
held to a tenth of the bytes."""
_MEMORY = 16
"""A guess counts a third as much once so many others have been judged."""


class GuessPrecision:
    """What came of the guesses for the layers that share slots. A place is thought worth it until it proves wrong."""

    def __init__(self) -> None:
        self._shares: dict[tuple[int, int], float] = defaultdict(lambda: WORTH)
        self._guessed: dict[int, Sequence[Expert]] = {}

    def worth_reading(self, layer: int, experts: Sequence[Expert]) -> list[Expert]:
        """Note the guess ``experts`` for the coming call of ``layer``; return those that are worth reading."""
        self._guessed[layer] = experts
        return [expert for place, expert in enumerate(experts) if self._shares[layer, place] >= WORTH]

    def judge(self, layer: int, wanted: Collection[Expert]) -> None:
        """Hear which experts ``layer`` wants."""
        for place, expert in enumerate(self._guessed.pop(layer, ())):
            self._shares[layer, place] += ((expert in wanted) - self._shares[layer, place]) / _MEMORY

    def forget(self) -> None:
        """Forget guesses that nobody has judged."""
        self._guessed.clear()
