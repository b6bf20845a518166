"""Bringing weights ahead of use: the next parts are on their way while the current one computes.

A part is what streams together: the tensors that one module holds directly. All decisions are made in the thread that
runs the model, when it takes a part or lets one go; other threads do nothing but bring what they were told to. So
there is no lock here, and an error of theirs surfaces in the forward that needed the part. What brings a part, and
into which memory, is the carrier's: from storage to the host, or over the link to an accelerator.

The experts of a mixture are brought when they are called, each whole at the call of its first part, and stay while
nothing else needs their room: a token that uses them again finds them. Which is called next nobody knows; but where
several neighbours were called in turn, as the many tokens of a prompt call nearly all, the next is brought as well.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from typing import Generic

import torch

from offstage.stages.dispatch.streaming.schedule import Schedule
from offstage.stages.dispatch.transfer.arena import Region
from offstage.stages.dispatch.transfer.carrier import Carrier, Delivery, Traffic
from offstage.stages.dispatch.transfer.trace import STALL_SECONDS, Trace
from offstage.stages.units import CPU, DeviceId

NEIGHBOURS = 4
"""After so many experts in turn the next is likely; a single token calls so many neighbours very rarely."""


class Lookahead(Generic[Region]):
    """Delivers parts by number to ``device``, as ``carrier`` brings them, ahead of use in ``order``.

    ``experts`` has the parts of each expert, neighbours beside each other: they are used together, and only where a
    forward decides so.
    """

    def __init__(
        self,
        carrier: Carrier[Region],
        order: Sequence[int],
        *,
        traffic: Traffic,
        device: DeviceId = CPU,
        experts: Sequence[Sequence[int]] = (),
        trace: Trace | None = None,
    ) -> None:
        self._carrier = carrier
        self._experts = [*experts]
        self._place = {part: place for place, parts in enumerate(experts) for part in parts}
        self._schedule = Schedule(order, self._place)
        self._deliveries: dict[int, Delivery[Region]] = {}
        self._idle: dict[int, None] = {}  # parts of experts that nobody uses now, the longest unused first
        self._lent: int | None = None  # the part that a backward pass has, until it asks for another one
        self._begun, self._in_turn = -1, 0  # the expert that was begun last, and how many were in turn by then
        self._device, self._traffic, self._trace = device, traffic, trace

    def take(self, part: int) -> list[torch.Tensor]:
        """Return the tensors of ``part``, in the carrier's order; waits for them if it must.

        They are views of the staging memory, to be given back with ``let_go``. Raises what bringing them raised.
        """
        lent, self._lent = self._lent, None
        if lent is not None and lent != part:
            self.let_go(lent)
        expects_others = self._schedule.use(part)
        delivery = self._deliveries.get(part) or self._on_demand(part)
        delivery.users += lent != part  # else the use that the backward pass has is the caller's now
        self._idle.pop(part, None)
        begins = self._begins(part)
        if begins:
            self._ask_expert(self._begun)
        if expects_others:
            self._expect_anew()
        else:
            self._ask_ahead()
        if begins and self._in_turn >= NEIGHBOURS:
            self._ask_expert(self._begun + 1)
        self._wait_for(part, delivery)
        self._traffic.count_use(self._device, at_rest=self._carrier.streamed[part], carried=self._carrier.carried[part])
        return self._carrier.views(part, delivery)

    def lend(self, part: int) -> list[torch.Tensor]:
        """Return the tensors of ``part`` as ``take`` does, to be given back by itself once another part is asked for.

        A backward pass asks for one tensor at a time, and nothing tells when it is done with a part.
        """
        if self._lent != part:
            found = self.take(part)
            self._lent = part
            return found
        return self._carrier.views(part, self._deliveries[part])

    def let_go(self, part: int) -> None:
        """Give ``part`` back: its memory is free once nothing views it, unless its next use was asked for already.

        A part of an expert may stay for a next use that nobody knows of.
        """
        delivery = self._deliveries[part]
        delivery.users -= 1
        if not delivery.users and part in self._carrier.kept and not delivery.overflow:
            self._idle[part] = None
        elif not delivery.users and (delivery.overflow or not self._schedule.wanted(part)):
            del self._deliveries[part]
            delivery.region = None  # a thread that has just brought it may not have let go of the delivery yet
        self._ask_ahead()

    def begin_pass(self) -> None:
        """Say that the model's forward begins."""
        lent, self._lent = self._lent, None
        if lent is not None:
            self.let_go(lent)
        self._begun = -1
        changed = self._schedule.begin_pass()
        if self._forget_failed() or changed:
            self._ask_ahead()  # what is there already stays
        self._forget_unwanted()
        self._ask_ahead()

    def end_pass(self) -> None:
        """Say that the model's forward has ended well: its parts are expected in the order in which it took them."""
        if self._schedule.end_pass():
            self._expect_anew()

    def turn(self, saved: Sequence[int]) -> None:
        """Say that the backward of a pass begins whose graph ``saved`` tensors of these parts, in this order."""
        if self._schedule.turn(saved):
            self._expect_anew()

    def take_back(self) -> None:
        """Take all parts back from calls that ended without letting go, as an interrupt ends them."""
        self._lent = None
        for part, delivery in self._deliveries.items():
            delivery.users = 0
            if part in self._carrier.kept and not delivery.overflow:
                self._idle.setdefault(part)

    def start_anew(self, *, in_use: bool) -> bool:
        """Forget what was on its way in the process that this one was forked from; return whether it can go on here.

        ``in_use`` says whether what is used is used here, by the thread that forked.
        """
        self._lent = None
        self._idle.clear()
        self._deliveries = {part: delivery for part, delivery in self._deliveries.items() if in_use and delivery.users}
        self._schedule.ask_again()
        return self._carrier.start_anew()

    def close(self) -> None:
        """Wait for what is under way and close the carrier; closing again does nothing."""
        self._lent = None
        for part in list(self._deliveries):
            self._drop(part)
        self._carrier.close()

    def _ask_ahead(self) -> None:
        """Ask for what comes next, as far as the staging memory has room."""
        for part in self._schedule.upcoming():
            if part not in self._deliveries:
                region = self._carrier.take(part, ahead=True)
                if region is None:
                    return
                self._ask(part, Delivery(region))

    def _expect_anew(self) -> None:
        """Ask for what comes next, and give up what was brought for what doesn't."""
        self._ask_ahead()  # what is there already stays
        self._forget_unwanted()
        self._ask_ahead()

    def _begins(self, part: int) -> bool:
        """Return whether ``part`` begins an expert whose parts have a memory of their own, and note which."""
        place = self._place.get(part, self._begun)
        if place == self._begun or part not in self._carrier.kept:
            return False
        self._in_turn = self._in_turn + 1 if place == self._begun + 1 else 1
        self._begun = place
        return True

    def _ask_expert(self, place: int) -> None:
        """Ask for all parts of an expert, as far as there is room without giving up its own or those in use."""
        expert = self._experts[place] if place < len(self._experts) else ()
        besides = {*expert, *self._experts[self._begun]}
        for other in expert:
            if other not in self._deliveries:
                region = self._replace(other, besides=besides)
                if region is None:
                    return
                self._ask(other, Delivery(region))
                self._idle[other] = None

    def _ask(self, part: int, delivery: Delivery[Region]) -> Delivery[Region]:
        """Have ``part`` brought."""
        self._carrier.bring(part, delivery)
        self._deliveries[part] = delivery
        return delivery

    def _wait_for(self, part: int, delivery: Delivery[Region]) -> None:
        """Wait until ``delivery`` is there. One that failed is given up, so that a later use asks for it again."""
        began = time.perf_counter()
        with ExitStack() as undo:
            undo.callback(self._drop, part)
            self._carrier.wait(delivery)
            undo.pop_all()
        delivery.arriving.clear()
        waited = time.perf_counter() - began
        self._traffic.count_stall(self._device, waited)
        if self._trace is not None and waited > STALL_SECONDS:
            self._trace.add(f"stall: part {part}", "stall", began)

    def _on_demand(self, part: int) -> Delivery[Region]:
        """Ask for ``part`` now. What nobody uses makes room for it; failing that, it gets new memory."""
        kept = part in self._carrier.kept
        region = self._replace(part, besides=self._experts[self._place[part]]) if kept else self._cut_back(part)
        if region is None and kept:
            region = self._replace(part)
        if region is not None:
            return self._ask(part, Delivery(region))
        outside = sum(self._carrier.sizes[other] for other, delivery in self._deliveries.items() if delivery.overflow)
        delivery = Delivery(self._carrier.beyond(part), overflow=True)
        self._traffic.overflow_bytes = max(self._traffic.overflow_bytes, outside + self._carrier.sizes[part])
        return self._ask(part, delivery)

    def _cut_back(self, part: int) -> Region | None:
        """Return room for ``part``, if need be that of what was brought ahead, the last first."""
        region = self._carrier.take(part)
        kept = self._carrier.kept
        ahead = [other for other, delivery in self._deliveries.items() if not delivery.users and other not in kept]
        if region is None and ahead:
            self._schedule.ask_again()
        while region is None and ahead:
            self._drop(ahead.pop())
            region = self._carrier.take(part)
        return self._carrier.take(part, anywhere=True) if region is None else region

    def _replace(self, part: int, *, besides: Collection[int] = ()) -> Region | None:
        """Return room for ``part`` of an expert, if need be that of what was used longest ago, none of ``besides``."""
        region = self._carrier.take(part)
        while region is None:
            oldest = next((other for other in self._idle if other not in besides), None)
            if oldest is None:
                return None
            self._drop(oldest)
            region = self._carrier.take(part)
        return region

    def _drop(self, part: int) -> None:
        """Give ``part`` up; its region is free once no thread fills it."""
        delivery = self._deliveries.pop(part)
        self._idle.pop(part, None)
        under_way = [work for work in delivery.arriving if not work.cancel()]
        wait(under_way)
        self._carrier.abandon([work for work in under_way if work.exception() is None])
        delivery.region = None

    def _forget_failed(self) -> bool:
        """Give up what was brought ahead and failed: by now it may be mended. Return whether there was such."""
        failed = [part for part, delivery in self._deliveries.items() if delivery.has_failed and not delivery.users]
        for part in failed:
            self._drop(part)
        if failed:
            self._schedule.ask_again()
        return bool(failed)

    def _forget_unwanted(self) -> None:
        """Give up what was brought ahead and is not expected any more."""
        for part in [part for part, delivery in self._deliveries.items() if not delivery.users]:
            if part not in self._idle and not self._schedule.wanted(part):
                self._drop(part)
