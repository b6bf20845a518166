"""The experts of one module during a call: those that its tokens are routed to are brought, the others never.

Which they are is known as the call begins, from the indices that the router gave, or from the first product. What can
be in slots at once is asked for then; what can't, a long prompt's nearly all, comes tensor by tensor in batches as
slots allow, each row once.

Calls in lockstep wait here until all have been routed, and the experts of all are brought once. Where slots are too few
for these, as many stay as leave some slots free; there each other one is brought, and used by all that want it, before
the next one; see ``ExpertTurns``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offstage.stages.dispatch.experts.eviction import Expert
from offstage.stages.dispatch.experts.expert_slots import ExpertSlots
from offstage.stages.dispatch.streaming.lockstep import WaitFor, current_call
from offstage.stages.dispatch.streaming.saved_weights import Bring, SavedWeights
from offstage.stages.empty_init.experts import routing
from offstage.stages.units import Position

_PASSED_ON = 4
"""Slots that experts pass through which can't all stay: one computes while the others are on their way."""


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    """When a tensor of an expert comes, inside the call of its module."""

    position: Position

    def expect(self, users: int) -> None:
        """Nothing: its slot is given up when another one needs it."""


class ExpertTurns:
    """The order of experts that calls of one module at ``position`` in a pass have in common, and their turns by it.

    Each expert is brought once for all calls that want it: these use it in turn before the next one's turn comes. A
    call that goes through all of its experts, one tensor of each after another, is a sweep; the first sweeps of all
    calls go together, then the second ones. One that goes from expert to expert, all tensors of each, waits for each.
    """

    def __init__(self, pool: ExpertSlots, wait_for: WaitFor, position: Position) -> None:
        self.order: dict[Expert, int] = {}
        self._pool, self._turn_of, self._position = pool, wait_for, position
        self._known: dict[Position, _Turn] = {}
        self._sweeps: dict[object, int] = {}  # how many each call has begun
        self._ahead: Position = ()  # what was asked for last

    def add(self, experts: Sequence[Expert]) -> None:
        """Have ``experts``, which are none of those that there are, come after these."""
        for expert in experts:
            self.order[expert] = len(self.order)

    def clear(self) -> None:
        """Have no experts."""
        self.order.clear()
        self._known.clear()
        self._sweeps.clear()
        self._ahead = ()

    def sweep(self, attribute: str, experts: Sequence[Expert], *, kept: Set[Expert]) -> Iterator[Expert]:
        """Yield each of ``experts`` as its turn comes, whose tensor ``attribute`` is there until the next one's.

        Those in ``kept`` stay in their slots meanwhile.
        """
        number = self._sweeps.get(current_call(), 0)
        self._sweeps[current_call()] = number + 1
        for expert in sorted(experts, key=self.when):
            position = self.when(expert)
            self._wait_for((number, position))
            self._pool.ask(expert, (attribute,), kept)
            self._ask_ahead(attribute, (number, position), kept)
            self._pool.wait([expert], attribute)
            yield expert

    def reach(self, attribute: str, expert: Expert, *, kept: Set[Expert]) -> None:
        """Return when it is the turn of ``expert``; its tensor ``attribute`` is on its way then."""
        self._wait_for((0, self.when(expert)))
        self._pool.ask(expert, (attribute,), kept)

    def when(self, expert: Expert) -> int:
        """Return when ``expert`` comes: one that nobody was routed to, and that is asked for all the same, last."""
        return self.order.get(expert, len(self.order))

    def _wait_for(self, inside: Position) -> None:
        position = (*self._position, *inside)
        self._turn_of(self._known.setdefault(position, _Turn(position)))

    def _ask_ahead(self, attribute: str, now: Position, kept: Set[Expert]) -> None:
        """Ask for what comes after ``now`` in the same sweep, as far as slots hold nothing that comes before it."""
        experts, (sweep, position) = list(self.order), now
        begun = self._ahead if self._ahead > now else now
        if begun[0] != sweep:
            return
        asked = begun[1] + 1
        busy = {*kept, *experts[position:asked]}
        while asked < len(experts) and self._pool.ask(experts[asked], (attribute,), busy):
            busy.add(experts[asked])
            asked += 1
        self._ahead = (sweep, asked - 1)


class RoutedExperts:
    """The experts of the layer ``number`` of ``pool``; ``attributes`` are the module's stacked tensors.

    What a backward pass needs of them ``saved`` has brought again. ``wait_for`` returns when the caller may use them;
    ``position`` is when the layer comes in a pass.
    """

    def __init__(
        self,
        pool: ExpertSlots,
        number: int,
        attributes: Sequence[str],
        saved: SavedWeights,
        *,
        wait_for: WaitFor = lambda shared: None,
        position: Position = (0,),
    ) -> None:
        self.position = position
        self._pool, self._number, self._attributes, self._saved = pool, number, attributes, saved
        self._wait_for = wait_for
        self._calls: dict[object, bool] = {}  # those under way, and whether it is known what they are routed to
        self._routed: set[Expert] = set()  # what calls are routed to that wait for others to come as far
        self._kept: set[Expert] = set()
        self._in_turn = ExpertTurns(pool, wait_for, position)

    def expect(self, users: int) -> None:
        """Nothing: how many of them calls in lockstep use is known as these begin."""

    @property
    def under_way(self) -> bool:
        """Whether the caller is in a call of the module."""
        return current_call() in self._calls

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Say that a call of ``module`` begins, a hook with keywords; what its tokens are routed to may show later."""
        if self.under_way:  # an interrupt has ended it
            self.forget()
        self._saved.enter(self)
        self._calls[current_call()] = False
        index = routing(module, args, kwargs)
        if index is not None:
            self.route(set(index.detach().reshape(-1).tolist()))

    def route(self, experts: Collection[int]) -> None:
        """Ask for ``experts``, which the tokens of the call under way are routed to, if nobody did before.

        What is there already is used first, and what all fits stays until the call ends, and those in lockstep with it.
        """
        if self._calls[current_call()]:
            return
        self._calls[current_call()] = True
        self._routed.update((self._number, expert) for expert in experts)
        self._wait_for(self)
        if self._routed:
            self._bring_together()

    def _bring_together(self) -> None:
        """Ask for the experts of all calls that have come here, as far as they fit."""
        hit = self._routed.difference(self._in_turn.order)
        self._routed.clear()
        hits = sorted(expert for expert in hit if self._pool.has(expert))
        missing = sorted(hit.difference(hits))
        self._pool.count(self._number, hits=hits, misses=len(missing))
        self._in_turn.add([*hits, *missing])
        self._kept = set(self._staying())
        for attribute in self._attributes:
            for expert in missing:
                if expert in self._kept:
                    self._pool.ask(expert, (attribute,), self._kept)

    def _staying(self) -> list[Expert]:
        """Return the experts that stay in slots until all calls that are under way have ended."""
        order, room = [*self._in_turn.order], self._pool.room(self._number)
        if len(order) <= room:
            return order
        return order[: room - max(1, min(_PASSED_ON, room // 2))] if len(self._calls) > 1 else []

    def end(self, *_: object) -> None:
        """Say that the call has ended; after the last, what was asked for and never used is given up."""
        if self.under_way:
            del self._calls[current_call()]
            self._saved.leave(self)
            if not self._calls:
                self.forget()
                self._pool.give_up(self._number)

    def forget(self) -> None:
        """Have no call be under way, as after an interrupt."""
        self._calls.clear()
        self._routed.clear()
        self._kept = set()
        self._in_turn.clear()

    def note_read_whole(self, count: int) -> None:
        """Hear that all of a stack, so many bytes, is read for the call under way."""
        self._pool.note_read_whole(self._number, count)

    @property
    def are_gone(self) -> bool:
        """Whether there are no slots any more that they could be brought into."""
        return not self._pool.is_open

    def lend(self, copied: torch.Tensor, bring: Bring) -> None:
        """Say that ``copied``, made of experts for the call under way, is what ``bring`` makes again."""
        self._saved.lend(copied, lambda: bring)

    def batches(self, attribute: str, experts: Sequence[int]) -> Iterator[tuple[list[int], torch.Tensor, list[int]]]:
        """Yield ``experts`` in batches, whose tensor ``attribute`` is there: first those that were, then as they come.

        With each batch comes a stretch of slots, stacked, and the place of each of the batch in it. While one batch
        computes, others are on their way, as far as there are slots.
        """
        keys = [(self._number, expert) for expert in experts]
        in_turn = [key for key in keys if self._takes_turns(key)]
        yield from self._as_they_come(attribute, [key for key in keys if key not in in_turn])
        for key in self._in_turn.sweep(attribute, in_turn, kept=self._kept):
            yield self._batch(attribute, [key])

    def _as_they_come(
        self, attribute: str, keys: Sequence[Expert]
    ) -> Iterator[tuple[list[int], torch.Tensor, list[int]]]:
        ready = [key for key in keys if self._pool.is_there(key, attribute)]
        missing = sorted(set(keys).difference(ready), key=self._in_turn.when)
        waiting, asked = deque(missing), deque[Expert]()
        size = max(1, min(-(-len(missing) // 2), self._pool.room(self._number) // 2))
        self._ask(attribute, waiting, asked, computing=ready)
        if ready:
            yield self._batch(attribute, ready)
        while waiting or asked:
            self._ask(attribute, waiting, asked, computing=())
            batch = [asked.popleft() for _ in range(min(size, len(asked)))]
            self._pool.wait(batch, attribute)
            self._ask(attribute, waiting, asked, computing=batch)
            yield self._batch(attribute, batch)

    def row(self, attribute: str, expert: int) -> torch.Tensor:
        """Return the tensor ``attribute`` of ``expert``; it stays until another one is asked for."""
        key = (self._number, expert)
        if self._takes_turns(key):
            self._in_turn.reach(attribute, key, kept=self._kept)
        ((_, stack, (place,)),) = self._as_they_come(attribute, [key])
        return stack[place]

    def _takes_turns(self, key: Expert) -> bool:
        """Return whether an expert is one that calls in lockstep use in turn, since slots are too few for all."""
        return len(self._calls) > 1 and key not in self._kept

    def _batch(self, attribute: str, keys: Sequence[Expert]) -> tuple[list[int], torch.Tensor, list[int]]:
        return [expert for _, expert in keys], *self._pool.stack(keys, attribute)

    def _ask(
        self, attribute: str, waiting: deque[Expert], asked: deque[Expert], *, computing: Collection[Expert]
    ) -> None:
        """Ask for what is ``waiting``, as far as there are slots that hold none that is needed before it."""
        busy = self._kept | {*asked, *computing}
        while waiting and self._pool.ask(waiting[0], (attribute,), busy):
            busy.add(waiting[0])
            asked.append(waiting.popleft())
