"""The experts of one kind that compute on one device and wait elsewhere: their slots, and what brings them there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from stages.dispatch.experts.bank import Bank
from stages.dispatch.experts.eviction import Eviction, Expert
from stages.dispatch.experts.row_carrier import RowArrival, RowCarrier, RowSource
from stages.dispatch.experts.slot_memory import Kind, SlotMemory, kind_bytes
from stages.dispatch.transfer.carrier import Traffic
from stages.dispatch.transfer.device_unpacker import DeviceUnpacker
from stages.dispatch.transfer.link import Link
from stages.dispatch.transfer.trace import Trace
from stages.plan.expert_banks import bank_bounds
from stages.units import DeviceId

Rows = Mapping[str, Sequence[RowSource]]
"""Where the rows of a layer's experts wait, by the attribute of their module, in the order of the experts."""


@dataclass(slots=True)
class ExpertUse:
    """What the experts of one layer came to: calls for one that found it in a slot or not, what was brought, and how
    many gave up a slot of this layer's bank for it.
    """

    hits: int = 0
    misses: int = 0
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
        for bank in dict.fromkeys(self._banks.values()):
            bank.policy.begin_pass()

    def has(self, expert: Expert) -> bool:
        """Return whether all of ``expert`` is in a slot, or on its way there."""
        return len(self._asked.get(expert, ())) == len(self._layers[expert[0]].rows)

    def is_there(self, expert: Expert, attribute: str) -> bool:
        """Return whether the tensor ``attribute`` of ``expert`` is in a slot and needn't be waited for."""
        return attribute in self._asked.get(expert, ()) and (expert, attribute) not in self._arriving

    def count(self, layer: int, *, hits: Sequence[Expert], misses: int) -> None:
        """Note a call of ``layer`` whose tokens are routed to ``hits``, which are there, and ``misses`` others."""
        use, policy = self.uses[layer], self._banks[layer].policy
        policy.begin_layer(layer)
        use.hits += len(hits)
        use.misses += misses
        self._traffic.expert_hits += len(hits)
        self._traffic.expert_misses += misses
        for expert in hits:
            policy.use(expert)

    def ask(self, expert: Expert, attributes: Iterable[str], busy: Collection[Expert]) -> bool:
        """Have the tensors ``attributes`` of ``expert`` be brought into its slot, as far as they aren't there.

        Return false where it lies in none, and all are ``busy``.
        """
        bank, use = self._banks[expert[0]], self.uses[expert[0]]
        before, slot = bank.evictions, bank.slot(expert)
        if slot is None:
            slot = bank.take(expert, busy, dropped=self._forget)
            if slot is None:
                return False
            bank.policy.use(expert)
            use.evictions += bank.evictions - before
        asked = self._asked.setdefault(expert, set())
        for attribute in attributes:
            if attribute not in asked:
                asked.add(attribute)
                use.streamed_bytes += self._bring(expert, attribute, slot)
        return True

    def _bring(self, expert: Expert, attribute: str, slot: int) -> int:
        assert self._memory is not None
        arrival = self._arriving[expert, attribute] = RowArrival()
        target = self._memory.row(attribute, slot)
        self._carrier.bring(self._layers[expert[0]].rows[attribute][expert[1]], target, arrival)
        return arrival.bytes

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
        for expert in {expert for expert, _ in self._arriving if layer is None or expert[0] == layer}:
            self._forget(expert)
            self._banks[expert[0]].drop(expert)

    def _forget(self, expert: Expert) -> None:
        """Have nothing of ``expert`` count as there, once nothing fills its slot any more."""
        for attribute in self._asked.pop(expert, ()):
            arrival = self._arriving.pop((expert, attribute), None)
            for piece in arrival.pieces if arrival is not None else ():
                if not piece.cancel():
                    piece.exception()  # whoever waited for it was told

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
