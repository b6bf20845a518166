"""The experts of one kind that compute on one device and wait elsewhere: their slots, and what brings them there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from offstage.stages.dispatch.experts.bank import Bank
from offstage.stages.dispatch.experts.eviction import Eviction, Expert
from offstage.stages.dispatch.experts.guess_precision import GuessPrecision
from offstage.stages.dispatch.experts.row_carrier import RowArrival, RowCarrier, RowSource, can_wait
from offstage.stages.dispatch.experts.slot_memory import Kind, SlotMemory, kind_bytes
from offstage.stages.dispatch.transfer.carrier import Traffic
from offstage.stages.dispatch.transfer.device_unpacker import DeviceUnpacker
from offstage.stages.dispatch.transfer.link import Link
from offstage.stages.dispatch.transfer.trace import Trace
from offstage.stages.plan.expert_slots import bank_bounds
from offstage.stages.units import DeviceId

Rows = Mapping[str, Sequence[RowSource]]
"""Where the rows of a layer's experts wait, by the attribute of their module, in the order of the experts."""


@dataclass(slots=True)
class ExpertUse:
    """What the experts of one layer came to: calls for one that found it in a slot or not, what was brought, and how
    many gave up a slot of this layer's bank for it. Of so many ``guesses`` that were read some came true: these count
    as misses.
    """

    hits: int = 0
    misses: int = 0
    guesses: int = 0
    guesses_used: int = 0
    streamed_bytes: int = 0
    evictions: int = 0


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The experts of one module: its ``number`` in the order of execution, how many it is likely to use ``together`` in
    one call, and where the rows wait.
    """

    number: int
    module: str
    together: int
    rows: Rows

    @property
    def count(self) -> int:
        """How many experts there are."""
        return len(next(iter(self.rows.values())))


class ExpertPool:
    """The slots of ``layers`` on ``device``, ``slot_bytes`` together, behind ``link``; at least one.

    ``unpacker`` is that of the device, null where the host unpacks.
    """

    def __init__(
        self,
        kind: Kind,
        layers: Sequence[ExpertLayer],
        *,
        device: DeviceId,
        link: Link,
        unpacker: DeviceUnpacker | None = None,
        slot_bytes: int,
        policy: Callable[[], Eviction],
        traffic: Traffic,
        trace: Trace | None = None,
    ) -> None:
        self._layers = {layer.number: layer for layer in layers}
        self._bytes = kind_bytes(kind)
        largest = max(layer.count for layer in layers)
        slots = max(1, min(slot_bytes // max(1, self._bytes), sum(layer.count for layer in layers)))
        bounds = bank_bounds(
            slots, layers=len(layers), largest=largest, together=max(layer.together for layer in layers)
        )
        self._memory: SlotMemory | None = SlotMemory(kind, bounds[-1][1], link, room=slot_bytes)
        banks = [Bank(begin, end, policy()) for begin, end in bounds]
        self._banks = {layer.number: banks[place % len(banks)] for place, layer in enumerate(layers)}
        sources = [row for layer in layers for rows in layer.rows.values() for row in rows]
        self._traffic = traffic
        self._carrier = RowCarrier(link, sources, device=device, unpacker=unpacker, traffic=traffic, trace=trace)
        self._asked: dict[Expert, set[str]] = {}
        self._arriving: dict[tuple[Expert, str], RowArrival] = {}
        self._guesses: dict[Expert, None] = {}  # brought for calls to come
        self._precision = GuessPrecision()
        self.uses = {layer.number: ExpertUse() for layer in layers}

    @property
    def slots(self) -> int:
        """How many slots there are."""
        return self._memory.count if self._memory is not None else 0

    def room(self, layer: int) -> int:
        """Return how many experts of ``layer`` can be in slots at once."""
        return self._banks[layer].size

    def begin_pass(self) -> None:
        """Say that the model's forward begins; what an interrupted one had on its way is given up."""
        self.give_up()
        self._precision.forget()
        for bank in dict.fromkeys(self._banks.values()):
            bank.policy.begin_pass()

    def has(self, expert: Expert) -> bool:
        """Return whether all of ``expert`` is in a slot, or on its way there."""
        return expert not in self._guesses and len(self._asked.get(expert, ())) == len(self._layers[expert[0]].rows)

    def is_there(self, expert: Expert, attribute: str) -> bool:
        """Return whether the tensor ``attribute`` of ``expert`` is in a slot and needn't be waited for."""
        return attribute in self._asked.get(expert, ()) and (expert, attribute) not in self._arriving

    def count(self, layer: int, *, hits: Collection[Expert], guessed: Collection[Expert], misses: int) -> None:
        """Note a call of ``layer`` whose tokens are routed to ``hits``, which are there, to those that were ``guessed``
        and come, and to ``misses`` others.
        """
        use, bank = self.uses[layer], self._banks[layer]
        bank.policy.begin_layer(layer)
        brought = len(guessed) + misses
        use.hits += len(hits)
        use.misses += brought
        self._traffic.expert_hits += len(hits)
        self._traffic.expert_misses += brought
        for expert in (*hits, *guessed):
            bank.use(expert)

    def ask(self, expert: Expert, attributes: Iterable[str], busy: Collection[Expert]) -> bool:
        """Have the tensors ``attributes`` of ``expert`` be brought into its slot, as far as they aren't there.

        Return false where it lies in none, and all are ``busy``.
        """
        bank, use = self._banks[expert[0]], self.uses[expert[0]]
        if expert in self._guesses:  # one that came to nothing
            self._drop([expert])
        if bank.slot(expert) is None:
            if self._take(expert, busy) is None:
                self._drop([guess for guess in self._guesses if self._banks[guess[0]] is bank])
                if self._take(expert, busy) is None:
                    return False
            bank.use(expert)
        asked = self._asked.setdefault(expert, set())
        for attribute in attributes:
            if attribute not in asked:
                use.streamed_bytes += self._bring(expert, attribute).bytes
        return True

    def _take(self, expert: Expert, busy: Collection[Expert]) -> int | None:
        """Return a slot for ``expert``; null where all are ``busy``."""
        bank = self._banks[expert[0]]
        before = bank.evictions
        slot = bank.take(expert, busy, dropped=self._forget)
        self.uses[expert[0]].evictions += bank.evictions - before
        return slot

    def _bring(self, expert: Expert, attribute: str, *, likely: bool = False) -> RowArrival:
        """Start what brings a tensor of ``expert`` into its slot."""
        slot = self._banks[expert[0]].slot(expert)
        assert self._memory is not None
        assert slot is not None
        self._asked.setdefault(expert, set()).add(attribute)
        arrival = self._arriving[expert, attribute] = RowArrival()
        row = self._layers[expert[0]].rows[attribute][expert[1]]
        self._carrier.bring(row, self._memory.row(attribute, slot), arrival, likely=likely)
        return arrival

    def guess(self, layer: int, experts: Sequence[Expert], busy: Collection[Expert]) -> None:
        """Have those of ``experts`` that ``layer`` will probably want be read where nothing that is certain waits.

        The likeliest come first. Those that find no slot but ``busy`` ones, or rest packed, wait until they are asked
        for.
        """
        kept, rows = {*busy, *experts}, self._layers[layer].rows
        for expert in self._precision.worth_reading(layer, experts):
            if self._banks[layer].slot(expert) is None and all(can_wait(row[expert[1]]) for row in rows.values()):
                if self._take(expert, kept) is None:
                    return
                self._guesses[expert] = None
                for attribute in rows:
                    self._bring(expert, attribute, likely=True)

    def judge(self, layer: int, wanted: Collection[Expert]) -> list[Expert]:
        """Return the guesses of ``layer`` that are among those ``wanted``, which are certain now.

        Of the others, what is there stays until its slot is needed; what hasn't begun to come won't.
        """
        self._precision.judge(layer, wanted)
        right = []
        for expert in [guess for guess in self._guesses if guess[0] == layer]:
            arrivals = [self._arriving[expert, attribute] for attribute in self._layers[layer].rows]
            begun = any(arrival.has_begun for arrival in arrivals)
            came_true = expert in wanted and not any(arrival.has_failed for arrival in arrivals)
            self._count_guess(layer, begun=begun, came_true=came_true)
            if came_true:
                del self._guesses[expert]
                self._carrier.make_certain(arrivals)
                self.uses[layer].streamed_bytes += sum(arrival.bytes for arrival in arrivals)
                right.append(expert)
            else:
                self._set_aside(expert, arrivals, failed=expert in wanted)
        return right

    def _set_aside(self, expert: Expert, arrivals: Sequence[RowArrival], *, failed: bool) -> None:
        """Keep a guess that came to nothing if all of it is there; if not, have no more of it come."""
        if failed or not any(arrival.has_begun for arrival in arrivals):
            self._drop([expert])
        elif all(arrival.is_whole for arrival in arrivals):
            self._keep_unused(expert)
        else:
            self._carrier.stop(arrivals)

    def _count_guess(self, layer: int, *, begun: bool, came_true: bool) -> None:
        """Count a guess, if it has been read of it before it was certain."""
        if begun:
            self.uses[layer].guesses += 1
            self.uses[layer].guesses_used += came_true
            self._traffic.expert_guesses += 1
            self._traffic.expert_guesses_used += came_true

    def _keep_unused(self, expert: Expert) -> None:
        """Let a guess that came to nothing, and is there, be the first to make room."""
        del self._guesses[expert]
        self._carrier.keep([self._arriving.pop((expert, attribute)) for attribute in self._asked[expert]])
        self._banks[expert[0]].keep_unused(expert)

    def wait(self, experts: Iterable[Expert], attribute: str) -> None:
        """Wait for the tensor ``attribute`` of those of ``experts`` where it is on its way.

        Raises what bringing one raised.
        """
        awaited = [(expert, attribute) for expert in experts if (expert, attribute) in self._arriving]
        self._carrier.wait([self._arriving[piece] for piece in awaited])
        for piece in awaited:
            del self._arriving[piece]

    def give_up(self, layer: int | None = None) -> None:
        """Have what is still on its way into slots of ``layer``, or of all, lie nowhere, once nothing fills them."""
        self._drop({expert for expert, _ in self._arriving if layer is None or expert[0] == layer})

    def _drop(self, experts: Iterable[Expert]) -> None:
        """Have ``experts`` lie nowhere, once nothing fills their slots any more."""
        for expert in experts:
            self._forget(expert)
            self._banks[expert[0]].drop(expert)

    def _forget(self, expert: Expert) -> None:
        """Have nothing of ``expert`` count as there, once nothing fills its slot any more."""
        self._guesses.pop(expert, None)
        for attribute in self._asked.pop(expert, ()):
            if (expert, attribute) in self._arriving:
                self._carrier.let_go(self._arriving.pop((expert, attribute)))

    def stack(self, experts: Sequence[Expert]) -> tuple[Mapping[str, torch.Tensor], list[int]]:
        """Return a stretch of slots, stacked, by attribute, and where in it each of ``experts`` lies (of one layer)."""
        assert self._memory is not None
        slots = [self._banks[expert[0]].slot(expert) for expert in experts]
        begin, end = min(slot for slot in slots if slot is not None), max(slot for slot in slots if slot is not None)
        return self._memory.stack(begin, end + 1), [slot - begin for slot in slots if slot is not None]

    def close(self) -> None:
        """Wait for what is under way, close the files and free the memory; closing again does nothing."""
        self.give_up()
        self._carrier.close()
        self._memory = None
