"""The cache of streamed weights on one device: a ring for what is certain, slots for what a forward decides to use.

What a pass uses for certain is brought ahead of use, in order: the next parts are on their way while the current one
computes. A part is what streams together: the tensors that one module holds directly. The experts of a list are brought
when they are called, and stay in their slots while nothing else needs them.

All decisions are made as a part is acquired or released, by the thread that owns what streams of the model: one is in a
pass, a backward or a call at a time (``PassLock``), so there is no lock here. Other threads do nothing but bring what
they were told to, and an error of theirs surfaces in the forward that needed the part.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from offstage.stages.dispatch.experts.listed_slots import ListedSlots
from offstage.stages.dispatch.streaming.schedule import Schedule
from offstage.stages.dispatch.transfer.mover import Mover, Transfer
from offstage.stages.dispatch.transfer.part_layout import PartLayout
from offstage.stages.dispatch.transfer.ring import Ring


@dataclass(slots=True, eq=False)
class _RingEntry:
    """A part in the ring, or in memory ``beyond`` it, and how many calls use it."""

    transfer: Transfer
    is_beyond: bool = False
    users: int = 0


class WeightCache:
    """Has the parts of these ``layouts``, by number, brought by ``mover`` into ``ring``, ahead of use in ``order``.

    Those of ``passing`` only a forward decides to use, and those of ``experts`` too, which have slots.
    """

    def __init__(
        self,
        layouts: Sequence[PartLayout],
        mover: Mover,
        ring: Ring,
        order: Sequence[int],
        *,
        experts: ListedSlots | None = None,
        passing: Collection[int] = (),
    ) -> None:
        self._layouts, self._mover, self._ring, self.experts = layouts, mover, ring, experts
        self._in_slots = experts.parts if experts is not None else {}
        self._schedule = Schedule(order, {*passing, *self._in_slots})
        self._entries: dict[int, _RingEntry] = {}
        self._bytes = [mover.bytes_of(layout) for layout in layouts]
        self._is_full = False  # the ring, when it was last asked ahead
        self._lent: int | None = None  # the part that a backward pass has, until it asks for another one

    def acquire(self, part: int) -> list[torch.Tensor]:
        """Return the tensors of ``part``, in its layout's order; waits for them if it must.

        They are views of memory that is given to others after ``release``. Raises what bringing them raised.
        """
        lent, self._lent = self._lent, None
        if lent == part:  # the use that the backward pass has is the caller's now
            self._end_use(part)
        elif lent is not None:
            self.release(lent)
        if self.experts is not None and self._has_slot(part) and self.experts.acquire(part):
            self._ask_ahead()
        else:
            expects_others = self._schedule.use(part)
            entry = self._entries.get(part) or self._bring(part)
            entry.users += 1
            if expects_others:
                self._expect_anew()
            elif not self._is_full:  # else there is no more room than before
                self._ask_ahead()
            try:
                self._mover.wait([entry.transfer], f"part {part}")
            except BaseException:  # given up, so that a later use asks for it again
                self._drop(part)
                raise
        self._mover.count_use(*self._bytes[part])
        return self._views(part)

    def lend(self, part: int) -> list[torch.Tensor]:
        """Return the tensors of ``part`` as ``acquire`` does, to be given back by itself once another is asked for.

        A backward pass asks for one tensor at a time, and nothing tells when it is done with a part.
        """
        if self._lent != part:
            tensors = self.acquire(part)
            self._lent = part
            return tensors
        return self._views(part)

    def release(self, part: int) -> None:
        """Give ``part`` back: its memory is free once nothing views it, unless its next use was asked for already."""
        self._end_use(part)
        entry = self._entries.get(part)
        if entry is not None and not entry.users and (entry.is_beyond or not self._schedule.wanted(part)):
            del self._entries[part]
            entry.transfer.region = None  # a thread that has just brought it may not have let go of it yet
        self._ask_ahead()

    def begin_pass(self) -> None:
        """Say that the model's forward begins."""
        lent, self._lent = self._lent, None
        if lent is not None:
            self.release(lent)
        if self.experts is not None:
            self.experts.begin_pass()
        self._schedule.begin_pass()
        self._forget_failed()
        self._ask_ahead()
        self._expect_anew()

    def end_pass(self) -> None:
        """Say that the model's forward has ended well: its parts are expected in the order in which it used them."""
        if self._schedule.end_pass():
            self._expect_anew()

    def turn(self, saved: Sequence[int]) -> None:
        """Say that the backward of a pass begins whose graph ``saved`` tensors of these parts, in this order."""
        if self._schedule.turn(saved):
            self._expect_anew()

    def recover(self) -> None:
        """Take all parts back from calls that ended without giving them back, as an interrupt ends them."""
        self._lent = None
        for entry in self._entries.values():
            entry.users = 0
        if self.experts is not None:
            self.experts.recover()

    def start_anew(self, *, in_use: bool) -> bool:
        """Forget what was on its way in the process that this one was forked from; return whether it can go on here.

        ``in_use`` says whether what is used is used here, by the thread that forked.
        """
        self._lent = None
        self._entries = {part: entry for part, entry in self._entries.items() if in_use and entry.users}
        self._schedule.ask_again()
        if not self._mover.start_anew():
            return False
        self._ring.renew()
        if self.experts is not None:
            self.experts.start_anew(in_use=in_use)
        return True

    def close(self) -> None:
        """Wait for what is under way, close the files and free the memory; closing again does nothing."""
        self._lent = None
        for part in list(self._entries):
            self._drop(part)
        if self.experts is not None:
            self.experts.close()
        self._mover.close()
        self._ring.close()

    def _end_use(self, part: int) -> None:
        """Have one use of ``part`` be over; it may be used again at once."""
        entry = self._entries.get(part)
        if entry is not None:
            entry.users -= 1
        elif self.experts is not None:
            self.experts.release(part)

    def _has_slot(self, part: int) -> bool:
        """Return whether ``part`` is a piece of an expert, and wasn't brought beside the slots."""
        return part in self._in_slots and part not in self._entries

    def _views(self, part: int) -> list[torch.Tensor]:
        """Return the tensors of ``part``, which is in use."""
        entry = self._entries.get(part)
        if entry is None:
            assert self.experts is not None
            return self.experts.views(part)
        assert entry.transfer.region is not None
        return self._layouts[part].views(entry.transfer.region)

    def _ask_ahead(self) -> None:
        """Ask for what comes next, as far as the ring has room."""
        schedule = self._schedule
        while (part := schedule.next_to_ask()) is not None:
            if part not in self._entries:
                region = self._ring.take(part, ahead=True)
                self._is_full = region is None
                if region is None:
                    return
                entry = self._entries[part] = _RingEntry(Transfer(region))
                self._mover.fetch(self._layouts[part], entry.transfer)
            schedule.note_asked(part)

    def _expect_anew(self) -> None:
        """Ask for what comes next; of what was brought for another order, what comes last or never makes room first."""
        self._ask_ahead()  # what is there already stays
        unwanted = [
            part for part, entry in self._entries.items() if not entry.users and not self._schedule.wanted(part)
        ]
        if unwanted:
            places = {part: place for place, part in reversed([*enumerate(self._schedule.expected())])}
            unwanted.sort(key=lambda part: places.get(part, len(places)), reverse=True)
        for part in unwanted:
            if not self._schedule.wanted(part):
                self._drop(part)
                self._ask_ahead()

    def _bring(self, part: int) -> _RingEntry:
        """Have ``part`` brought now, into the ring or, where all of that is in use, into memory beyond it."""
        region = self._make_room(part) if part not in self._in_slots else None
        is_beyond = region is None
        if region is None:
            size, traffic = self._layouts[part].size, self._mover.traffic
            beyond = sum(
                self._layouts[other].size for other, other_entry in self._entries.items() if other_entry.is_beyond
            )
            traffic.overflow_bytes = max(traffic.overflow_bytes, beyond + size)
            region = self._ring.beyond(size)
        entry = self._entries[part] = _RingEntry(Transfer(region, is_awaited=True), is_beyond)
        self._mover.fetch(self._layouts[part], entry.transfer)
        return entry

    def _make_room(self, part: int) -> torch.Tensor | None:
        """Return memory of the ring for ``part``, for which what was brought ahead makes room, the last first."""
        region = self._ring.take(part)
        ahead = [other for other, entry in self._entries.items() if not entry.users] if region is None else []
        if ahead:
            self._schedule.ask_again()
        while region is None and ahead:
            self._drop(ahead.pop())
            region = self._ring.take(part)
        return self._ring.take(part, anywhere=True) if region is None else region

    def _drop(self, part: int) -> None:
        """Give ``part`` up; its region is free once no thread fills it."""
        self._mover.abandon(self._entries.pop(part).transfer)

    def _forget_failed(self) -> None:
        """Give up what was brought ahead and failed: by now it may be mended."""
        failed = [part for part, entry in self._entries.items() if entry.transfer.has_failed and not entry.users]
        for part in failed:
            self._drop(part)
        if failed:
            self._schedule.ask_again()
