"""The experts that compute on a device and wait elsewhere: which of them has which slot, and what is on its way there.

An expert has a slot whole, whether it is a row of a module's stacks or a module of a list, and makes room whole. What
there is of it comes piece by piece: a row of one stack, or the tensors of one module.

The slots are divided into banks, and each layer of a mixture has its experts in one of them: a call then sees a stretch
of slots about as wide as the layer it stands for, and what one layer brings doesn't push out all others.

All of this is the thread's that owns what streams of the model (``PassLock``); other threads only fill slots.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from offstage.stages.dispatch.experts.eviction import Eviction, Expert
from offstage.stages.dispatch.experts.slot_memory import ExpertLayer, SlotRegions, SlotRows
from offstage.stages.dispatch.transfer.mover import Mover, Transfer
from offstage.stages.dispatch.transfer.reading_threads import Urgency
from offstage.stages.units import format_bytes

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class ExpertUse:
    """What the experts of one layer came to: calls for one that found it in a slot or not, what was brought, and how
    many gave up a slot of this layer's bank for it.
    """

    hits: int = 0
    misses: int = 0
    streamed_bytes: int = 0
    evictions: int = 0


@dataclass(slots=True)
class Bank:
    """Slots that some layers share, and by which rule an expert in one of them makes room.

    Those that are ``unused`` were brought before they were called, and weren't yet: they make room first.
    """

    room: SlotRows | SlotRegions
    policy: Eviction = field(default_factory=Eviction)
    unused: dict[Expert, None] = field(default_factory=dict)

    def use(self, expert: Expert) -> None:
        """Note a use of ``expert``, which has a slot."""
        self.unused.pop(expert, None)
        self.policy.use(expert)

    def victim(self, busy: Container[Expert]) -> Expert | None:
        """Return who makes room next, none of ``busy``; null where all are busy."""
        unused = next((expert for expert in self.unused if expert not in busy), None)
        return unused or self.policy.victim(busy)


@dataclass(slots=True, eq=False)
class Entry:
    """An expert that has a slot, and what was asked for of it: on its way, or null once it is there.

    So many ``users`` have something of it in use.
    """

    slot: Any
    pieces: dict[str, Transfer | None] = field(default_factory=dict)
    users: int = 0

    @property
    def arriving(self) -> list[Transfer]:
        """What is on its way, or came and was not yet waited for."""
        return [transfer for transfer in self.pieces.values() if transfer is not None]

    @property
    def has_failed(self) -> bool:
        """Whether something of it was on its way, and won't come."""
        return any(transfer.has_failed for transfer in self.arriving)


class ExpertSlots:
    """The experts of ``layers``, each in a slot of its layer's bank, where ``mover`` brings it.

    What is wanted has this ``urgency``.
    """

    def __init__(
        self,
        layers: Sequence[ExpertLayer],
        banks: Mapping[int, Bank],
        mover: Mover,
        *,
        urgency: Urgency = Urgency.AWAITED,
    ) -> None:
        self._layers = {layer.number: layer for layer in layers}
        self._banks, self._mover, self._urgency = banks, mover, urgency
        self._entries: dict[Expert, Entry] = {}
        self._coming: dict[Expert, None] = {}  # those of which something is on its way
        self._told: set[int] = set()
        self.is_open = True
        self.uses = {layer.number: ExpertUse() for layer in layers}

    @property
    def uses_by_module(self) -> dict[str, ExpertUse]:
        """What the experts of each layer came to, by its module."""
        return {self._layers[number].module: use for number, use in self.uses.items()}

    def room(self, layer: int) -> int:
        """Return how many experts of ``layer`` can be in slots at once."""
        return self._banks[layer].room.size

    def begin_pass(self) -> None:
        """Say that the model's forward begins; what is on its way stays, unless something of it has failed."""
        coming = [(expert, self._entries[expert]) for expert in self._coming]
        self._drop(expert for expert, entry in coming if entry.has_failed and not entry.users)
        for policy in {id(bank): bank.policy for bank in self._banks.values()}.values():
            policy.begin_pass()

    def has(self, expert: Expert) -> bool:
        """Return whether all of ``expert`` is in a slot, or on its way there, for an earlier call."""
        entry, layer = self._entries.get(expert), expert[0]
        is_whole = entry is not None and len(entry.pieces) == len(self._layers[layer].rows)
        return is_whole and expert not in self._banks[layer].unused

    def is_there(self, expert: Expert, piece: str) -> bool:
        """Return whether the ``piece`` of ``expert`` is in a slot and needn't be waited for."""
        entry = self._entries.get(expert)
        return entry is not None and entry.pieces.get(piece, entry) is None

    def count(self, layer: int, *, hits: Collection[Expert], misses: int) -> None:
        """Note a call of ``layer`` whose tokens are routed to ``hits``, which are there, and to ``misses`` others."""
        use, bank = self.uses[layer], self._banks[layer]
        bank.policy.begin_layer(layer)
        use.hits += len(hits)
        use.misses += misses
        self._mover.traffic.expert_hits += len(hits)
        self._mover.traffic.expert_misses += misses
        for expert in hits:
            bank.use(expert)

    def ask(self, expert: Expert, pieces: Iterable[str], busy: Container[Expert], *, is_likely: bool = False) -> bool:
        """Have ``pieces`` of ``expert`` be brought into its slot, as far as they aren't there.

        Return false where it lies in none, and all are ``busy``. One that isn't called yet, but ``is_likely`` to
        be, is the first to make room.
        """
        bank, entry = self._banks[expert[0]], self._entries.get(expert)
        if entry is None:
            entry = self._take(expert, busy)
            if entry is None:
                return False
            if is_likely:
                bank.unused[expert] = None
            else:
                bank.use(expert)
        for piece in pieces:
            if piece not in entry.pieces:
                layout = self._layers[expert[0]].layout(expert[1], piece)
                region = bank.room.region(entry.slot, expert, piece)
                transfer = entry.pieces[piece] = Transfer(region, is_awaited=not is_likely)
                self._coming[expert] = None
                self._mover.fetch(layout, transfer, urgency=self._urgency)
                self.uses[expert[0]].streamed_bytes += layout.rest_bytes
        return True

    def _take(self, expert: Expert, busy: Container[Expert]) -> Entry | None:
        """Return ``expert`` with a slot, for which others make room; null where all are ``busy``."""
        bank = self._banks[expert[0]]
        while (slot := bank.room.take(expert)) is None:
            victim = bank.victim(busy)
            if victim is None:
                return None
            self._drop([victim])
            self.uses[expert[0]].evictions += 1
        entry = self._entries[expert] = Entry(slot)
        return entry

    def wait(self, experts: Iterable[Expert], piece: str) -> None:
        """Wait for the ``piece`` of those of ``experts`` where it is on its way. Raises what bringing one raised."""
        awaited = [expert for expert in experts if self._entries[expert].pieces.get(piece) is not None]
        self._arrive(awaited, piece)
        for expert in awaited:
            self._mover.count_use(*self._mover.bytes_of(self._layers[expert[0]].layout(expert[1], piece)))

    def _arrive(self, experts: Sequence[Expert], piece: str) -> None:
        """Wait for the ``piece`` of all ``experts``, and have computing follow what brings it."""
        transfers = [transfer for expert in experts if (transfer := self._entries[expert].pieces.get(piece))]
        self._mover.wait(transfers, "experts")
        for expert in experts:
            entry = self._entries[expert]
            entry.pieces[piece] = None
            if not entry.arriving:
                self._coming.pop(expert, None)

    def note_read_whole(self, layer: int, count: int) -> None:
        """Note that all of a stack of ``layer``, so many bytes, is in memory at once, beyond all budgets."""
        self._mover.traffic.overflow_bytes = max(self._mover.traffic.overflow_bytes, count)
        if layer not in self._told:
            self._told.add(layer)
            _log.warning(
                "%s: the model's code asks for all experts of a stack at once, %s beyond the budget",
                self._layers[layer].module,
                format_bytes(count),
            )

    def give_up(self, layer: int) -> None:
        """Have what is still on its way into slots of ``layer`` lie nowhere, once nothing fills them."""
        self._drop([expert for expert in self._coming if expert[0] == layer])

    def _drop(self, experts: Iterable[Expert]) -> None:
        """Have ``experts`` lie nowhere, once nothing fills their slots any more."""
        for expert in experts:
            entry, bank = self._entries.pop(expert), self._banks[expert[0]]
            self._coming.pop(expert, None)
            for transfer in entry.arriving:
                self._mover.abandon(transfer)
            bank.unused.pop(expert, None)
            bank.policy.forget(expert)
            bank.room.give(entry.slot)

    def stack(self, experts: Sequence[Expert], piece: str) -> tuple[torch.Tensor, list[int]]:
        """Return the tensors ``piece`` of a stretch of slots, stacked, and where ``experts`` of a layer lie in it."""
        rows = self._banks[experts[0][0]].room
        assert isinstance(rows, SlotRows)
        slots: list[int] = [self._entries[expert].slot for expert in experts]
        begin, end = min(slots), max(slots)
        return rows.stack(experts[0][0], piece, begin, end + 1), [slot - begin for slot in slots]

    def close(self) -> None:
        """Wait for what is under way, close the files and free the memory; closing again does nothing."""
        if self.is_open:
            self._drop([*self._coming])
            self._mover.close()
            self._entries.clear()
            self._banks, self.is_open = {}, False
