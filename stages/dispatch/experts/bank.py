"""Which expert lies in which slot.

The slots are divided into banks, and each layer of a mixture has its experts in one of them: a call then sees a
stretch of slots about as wide as the layer it stands for, and what one layer brings doesn't push out all others.
"""

from __future__ import annotations

from collections.abc import Callable, Container

from offstage.stages.dispatch.experts.eviction import Eviction, Expert


class Bank:
    """The slots from ``begin`` to ``end``, and the experts in them; its ``policy`` says who makes room."""

    def __init__(self, begin: int, end: int) -> None:
        self.policy, self.size = Eviction(), end - begin
        self.evictions = 0
        self._free = list(range(end - 1, begin - 1, -1))
        self._slots: dict[Expert, int] = {}
        self._unused: dict[Expert, None] = {}

    def slot(self, expert: Expert) -> int | None:
        """Return where ``expert`` lies; null if nowhere."""
        return self._slots.get(expert)

    def take(
        self, expert: Expert, busy: Container[Expert], *, dropped: Callable[[Expert], object] = lambda _expert: None
    ) -> int | None:
        """Return a slot for ``expert``, which lies nowhere: a free one, or that of one that isn't ``busy``.

        ``dropped`` is told whose slot it was. Null where all are busy.
        """
        if not self._free:
            unused = next((one for one in self._unused if one not in busy), None)
            victim = unused or self.policy.victim(busy)
            if victim is None:
                return None
            dropped(victim)
            self.drop(victim)
            self.evictions += 1
        self._slots[expert] = self._free.pop()
        return self._slots[expert]

    def use(self, expert: Expert) -> None:
        """Note a use of ``expert``, which lies in a slot."""
        self._unused.pop(expert, None)
        self.policy.use(expert)

    def keep_unused(self, expert: Expert) -> None:
        """Have ``expert``, which was never used, be the first to make room."""
        self._unused[expert] = None

    def drop(self, expert: Expert) -> None:
        """Have the slot of ``expert`` be free."""
        self._free.append(self._slots.pop(expert))
        self._unused.pop(expert, None)
        self.policy.forget(expert)
