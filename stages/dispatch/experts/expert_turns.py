"""Calls in lockstep that want more experts of one module than there are slots use them one after another.

Each expert is brought once for all calls that want it: these use it in turn before the next one's turn comes. A call
that goes through all of its experts, one tensor of each after another, is a sweep; the first sweeps of all calls go
together, then the second ones. A call that goes from expert to expert, all tensors of each, waits for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass

from offstage.stages.dispatch.experts.eviction import Expert
from offstage.stages.dispatch.experts.expert_slots import ExpertSlots
from offstage.stages.dispatch.streaming.lockstep import Turns, current_call
from offstage.stages.units import Position


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    """When a tensor of an expert comes, inside the call of its module."""

    position: Position

    def expect(self, users: int) -> None:
        """Nothing: its slot is given up when another one needs it."""


class ExpertTurns:
    """The order of experts that calls of one module at ``position`` in a pass have in common, and their turns by it."""

    def __init__(self, pool: ExpertSlots, turns: Callable[[], Turns], position: Position) -> None:
        self.order: dict[Expert, int] = {}
        self._pool, self._turns, self._position = pool, turns, position
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
        self._turns().wait_for(self._known.setdefault(position, _Turn(position)))

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
