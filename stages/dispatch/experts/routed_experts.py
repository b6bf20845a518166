"""The experts of one module during a call: those that its tokens are routed to are brought, the others never.

Which they are is known as the call begins, from the indices that the router gave, or from the first product. What can
be in slots at once is asked for then; what can't, a long prompt's nearly all, comes tensor by tensor in batches as
slots allow, each row once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence

import torch

from stages.dispatch.experts.eviction import Expert
from stages.dispatch.experts.pool import ExpertPool
from stages.dispatch.streaming.saved_weights import Bring, SavedWeights


class RoutedExperts:
    """The experts of the layer ``number`` of ``pool``; ``attributes`` are the module's stacked tensors.

    What a backward pass needs of them ``saved`` has brought again. ``place`` is when the layer comes in a pass.
    """

    def __init__(
        self, pool: ExpertPool, number: int, attributes: Sequence[str], saved: SavedWeights, *, place: int = 0
    ) -> None:
        self.place = place
        self._pool, self._number, self._attributes, self._saved = pool, number, attributes, saved
        self._kept: set[Expert] = set()
        self.under_way = self._is_routed = False

    def expect(self, users: int) -> None:
        """Nothing: which experts calls in lockstep will use isn't known; those of one stay in slots for the next."""

    def begin(self, index: torch.Tensor | None) -> None:
        """Say that a call begins whose tokens are routed to the experts ``index``; null where that isn't known yet."""
        self.under_way, self._is_routed = True, False
        self._saved.enter(self)
        if index is not None:
            self.route(set(index.detach().reshape(-1).tolist()))

    def route(self, experts: Collection[int]) -> None:
        """Ask for ``experts``, which the tokens of the call under way are routed to, if nobody did before.

        What is there already is used first, and what all fits stays until the call ends.
        """
        if self._is_routed:
            return
        self._is_routed = True
        hit = [(self._number, expert) for expert in sorted(experts)]
        there = [expert for expert in hit if self._pool.has(expert)]
        missing = sorted(set(hit).difference(there))
        self._pool.count(self._number, hits=there, misses=len(missing))
        self._kept = set(hit) if len(hit) <= self._pool.room(self._number) else set()
        for attribute in self._attributes if self._kept else ():
            for expert in missing:
                self._pool.ask(expert, (attribute,), self._kept)

    def end(self) -> None:
        """Say that the call has ended; what was asked for and never used is given up."""
        if self.under_way:
            self.under_way = False
            self._saved.leave(self)
            self._kept = set()
            self._pool.give_up(self._number)

    @property
    def are_gone(self) -> bool:
        """Whether there are no slots any more that they could be brought into."""
        return not self._pool.slots

    def lend(self, copied: torch.Tensor, bring: Bring) -> None:
        """Say that ``copied``, made of experts for the call under way, is what ``bring`` makes again."""
        self._saved.lend(copied, lambda: bring)

    def batches(self, attribute: str, experts: Sequence[int]) -> Iterator[tuple[list[int], torch.Tensor, list[int]]]:
        """Yield ``experts`` in batches, whose tensor ``attribute`` is there: first those that were, then as they come.

        With each batch comes a stretch of slots, stacked, and the place of each of the batch in it. While one batch
        computes, others are on their way, as far as there are slots.
        """
        keys = [(self._number, expert) for expert in experts]
        there = [key for key in keys if self._pool.is_there(key, attribute)]
        missing = [key for key in keys if not self._pool.is_there(key, attribute)]
        waiting, asked = deque(missing), deque[Expert]()
        size = max(1, min(-(-len(missing) // 2), self._pool.room(self._number) // 2))
        self._ask(attribute, waiting, asked, computing=there)
        if there:
            yield self._batch(attribute, there)
        while waiting or asked:
            self._ask(attribute, waiting, asked, computing=())
            batch = [asked.popleft() for _ in range(min(size, len(asked)))]
            self._pool.wait(batch, attribute)
            self._ask(attribute, waiting, asked, computing=batch)
            yield self._batch(attribute, batch)

    def row(self, attribute: str, expert: int) -> torch.Tensor:
        """Return the tensor ``attribute`` of ``expert``; it stays until another one is asked for."""
        ((_, stack, (place,)),) = self.batches(attribute, [expert])
        return stack[place]

    def _batch(self, attribute: str, keys: Sequence[Expert]) -> tuple[list[int], torch.Tensor, list[int]]:
        stacks, places = self._pool.stack(keys)
        return [expert for _, expert in keys], stacks[attribute], places

    def _ask(
        self, attribute: str, waiting: deque[Expert], asked: deque[Expert], *, computing: Collection[Expert]
    ) -> None:
        """Ask for what is ``waiting``, as far as there are slots that hold none that is needed before it."""
        busy = self._kept | {*asked, *computing}
        while waiting and self._pool.ask(waiting[0], (attribute,), busy):
            busy.add(waiting[0])
            asked.append(waiting.popleft())
