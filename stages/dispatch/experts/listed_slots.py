"""Experts that are modules of a list, in slots: each is brought whole as the first of its modules is called.

Which is called next nobody knows; but where several neighbours were called in turn, as the many tokens of a prompt call
nearly all, the next is brought as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch

from offstage.stages.dispatch.experts.eviction import Expert
from offstage.stages.dispatch.experts.expert_slots import Bank, ExpertSlots
from offstage.stages.dispatch.experts.slot_memory import ExpertLayer, SlotRegions
from offstage.stages.dispatch.transfer.mover import Mover
from offstage.stages.dispatch.transfer.reading_threads import Urgency

NEIGHBOURS = 4
"""After so many experts in turn the next is likely; a single token calls so many neighbours very rarely."""


class ListedSlots(ExpertSlots):
    """The experts of lists; ``parts`` has the expert that each part is a piece of, and which."""

    def __init__(
        self,
        layers: Sequence[ExpertLayer],
        room: SlotRegions,
        mover: Mover,
        *,
        parts: Mapping[int, tuple[Expert, str]],
    ) -> None:
        banks = dict.fromkeys((layer.number for layer in layers), Bank(room))
        super().__init__(layers, banks, mover, urgency=Urgency.CERTAIN)  # buffers are shared with what is certain
        self.parts, self._regions = parts, room
        self._order = [(layer.number, expert) for layer in layers for expert in range(layer.count)]
        self._place = {expert: place for place, expert in enumerate(self._order)}
        self._begun, self._in_turn = -1, 0  # the expert that was begun last, and how many were in turn by then
        self._in_use: dict[Expert, None] = {}

    def begin_pass(self) -> None:
        """Say that the model's forward begins, and no expert in turn yet; see ``ExpertSlots``."""
        self._begun = -1
        super().begin_pass()

    def acquire(self, part: int) -> bool:
        """Have ``part`` be there until its ``release``; return false where no slot is free for it.

        Raises what bringing it raised; a later use asks for all of its expert again.
        """
        expert, piece = self.parts[part]
        if self._place[expert] != self._begun or expert not in self._entries:
            self._begin(expert)
        entry = self._entries.get(expert)
        if entry is None:
            return False
        self.ask(expert, (piece,), ())
        with ExitStack() as undo:
            undo.callback(self._forget_piece, expert, piece)
            self._arrive([expert], piece)
            undo.pop_all()
        entry.users += 1
        self._in_use[expert] = None
        return True

    def _forget_piece(self, expert: Expert, piece: str) -> None:
        """Give up a ``piece`` that has failed, so that a later use asks for it again."""
        entry = self._entries[expert]
        transfer = entry.pieces.pop(piece)
        if transfer is not None:
            self._mover.abandon(transfer)
        if not entry.users:
            self._drop([expert])

    def views(self, part: int) -> list[torch.Tensor]:
        """Return the tensors of ``part``, which is in use."""
        expert, piece = self.parts[part]
        region = self._regions.region(self._entries[expert].slot, expert, piece)
        return self._layers[expert[0]].layout(expert[1], piece).views(region)

    def release(self, part: int) -> None:
        """Give ``part`` back; its expert stays until its slot is needed."""
        expert, _ = self.parts[part]
        entry = self._entries[expert]
        entry.users -= 1
        if not entry.users:
            self._in_use.pop(expert, None)

    def recover(self) -> None:
        """Take all back from calls that ended without giving it back."""
        self._in_use.clear()
        for entry in self._entries.values():
            entry.users = 0

    def start_anew(self, *, in_use: bool) -> None:
        """Forget what isn't used, in a process that was forked, if what is used ``is in_use`` here."""
        for expert, entry in [*self._entries.items()]:
            entry.pieces = {piece: None for piece, transfer in entry.pieces.items() if transfer is None}
            if not (in_use and entry.users):
                self._drop([expert])
        self._coming.clear()
        self._regions.renew()

    def close(self) -> None:
        """Free the memory, once the mover's link is closed; closing again does nothing."""
        super().close()
        self._regions.close()

    def _begin(self, expert: Expert) -> None:
        """Have ``expert`` be brought whole, and the next one too where it is likely."""
        place = self._place[expert]
        self._in_turn = self._in_turn + 1 if place == self._begun + 1 else 1
        self._begun = place
        bank, hits = self._banks[expert[0]], [expert] if self.has(expert) else []
        self.count(expert[0], hits=hits, misses=not hits)
        if expert in bank.unused:
            bank.use(expert)
        busy = {**self._in_use, expert: None}
        is_there = self.ask(expert, self._layers[expert[0]].rows, busy)
        if is_there and self._in_turn >= NEIGHBOURS and place + 1 < len(self._order):
            following = self._order[place + 1]
            self.ask(following, self._layers[following[0]].rows, busy, is_likely=True)
