"""One forward pass and its backward pass: what was saved, what of it goes, and when that comes back.

On the device there may be as many saved bytes as stay at the end of the forward pass: (1 - ratio) of all. Within that,
copies out need not be waited for, and in the backward pass, as memory is freed, what was saved last comes back first.
At least one span is always on its way back while another is in use, or nothing would come ahead at a ratio of 1.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass

import torch

from offstage.pipeline.errors import BudgetError
from offstage.stages.dispatch.transfer.trace import STALL_SECONDS, Trace
from offstage.stages.finetune.offload_choice import (
    TOLERANCE,
    AnyStore,
    Destination,
    SavedSizes,
    ShareChoice,
    piece_of,
)
from offstage.stages.finetune.saved_span import SavedSpan, SpanKey

_LEAVING = 2
"""Copies out that aren't waited for while the forward pass goes on."""


@dataclass(frozen=True, slots=True)
class ActivationTraffic:
    """What was saved for the backward pass in one iteration, in bytes: what stayed where it was, what went, and the
    most that was on the device at once.
    """

    kept_bytes: int = 0
    offloaded_bytes: int = 0
    peak_bytes: int = 0

    @property
    def ratio(self) -> float:
        """The share of the bytes that went; 0 of nothing."""
        return self.offloaded_bytes / max(self.kept_bytes + self.offloaded_bytes, 1)


class OffloadPass:
    """Spans in the order in which they were saved, of which what ``choice`` says goes to ``destination``."""

    def __init__(self, choice: ShareChoice, destination: Destination, *, trace: Trace | None = None) -> None:
        self.choice, self._destination = choice, destination
        self.freed: deque[int] = deque()
        self.began_backward = False
        self._ledger, self._trace = destination.ledger, trace
        self._order: list[weakref.ref[SavedSpan]] = []  # of each tensor that was saved, its span
        self._leaving: deque[weakref.ref[SavedSpan]] = deque()
        self._counted = self._peak = 0
        self._ahead = self._last_place = 0
        self._lock = threading.RLock()

    @property
    def traffic(self) -> ActivationTraffic:
        """What was saved and went so far, and the most that was on the device at once."""
        return ActivationTraffic(self.choice.total - self.choice.gone, self.choice.gone, self._peak)

    def save(self, tensor: torch.Tensor, key: SpanKey, *, stays: bool) -> SavedSpan:
        """Return a new span for the memory ``key`` of ``tensor``; some of it goes, or all, or nothing."""
        span = SavedSpan(tensor, key, self, stays=stays)
        with self._lock:
            store = self._destination.store(tensor.device)
            self._hold(span)
            going = self.choice.choose(span.size, stays=stays or store is None)
            if store is not None and going:
                self._send(span, store, going)
            elif self._ledger is not None:
                self._ledger.hold(tensor)
            self._wait_for_leaving(_LEAVING)
        return span

    def place(self, span: SavedSpan) -> int:
        """Return where in the order stands the tensor that is saved now, a view of ``span``."""
        with self._lock:
            span.handles += 1
            self._order.append(weakref.ref(span))
            return len(self._order) - 1

    def _send(self, span: SavedSpan, store: AnyStore, going: int) -> None:
        """Put the first ``going`` bytes of ``span`` away."""
        span.parcel = store.put(span.data(), going, self._trace)
        if span.parcel.is_leaving:
            self._leaving.append(weakref.ref(span))
        else:
            self._let_go(span)

    def _let_go(self, span: SavedSpan) -> None:
        span.let_go()
        self._hold(span)

    def _wait_for_leaving(self, spared: int) -> None:
        """Let go of what has left, the first first, all but ``spared``, until no more is held than stays in the end."""
        while len(self._leaving) > spared and self._held_now() > self.choice.staying:
            span = self._leaving.popleft()()
            if span is not None and span.is_leaving and span.parcel is not None:
                span.parcel.ready()
                self._let_go(span)

    def _hold(self, span: SavedSpan) -> None:
        """Count what ``span`` holds of the device now."""
        self._counted += span.on_device - span.counted
        span.counted = span.on_device
        self._peak = max(self._peak, self._held_now())

    def _held_now(self) -> int:
        while self.freed:
            self._counted -= self.freed.popleft()
        return self._counted

    def end_forward(self) -> None:
        """Make the share right where the pass was of another kind than the one before it, and let go of what goes.

        What the backward pass needs at once is the exception.
        """
        with self._lock:
            self.choice.is_over = True
            live = (span for reference in self._order if (span := reference()) is not None)
            spans = list(dict.fromkeys(live))
            slack = 1.5 * TOLERANCE * self.choice.total
            if self.choice.missing < -slack:
                self._take_back(spans)
            if self.choice.missing > slack:
                self._send_more(spans)
            self._wait_for_leaving(sum(span.is_leaving for span in spans[-_LEAVING:]))

    def _take_back(self, spans: list[SavedSpan]) -> None:
        """Bring back what went too much, the last first: the backward pass will want it first."""
        for span in reversed(spans):
            if self.choice.missing >= 0:
                return
            if span.parcel is not None:
                self.choice.gone -= span.gone
                self._keep(span)

    def _keep(self, span: SavedSpan) -> None:
        """Have ``span`` on the device as if it never had gone."""
        if span.source is None:
            span.source = self._arrived(span)
            span.version, span.source_begin = span.source._version, span.begin
        span.parcel = None
        self._hold(span)

    def _send_more(self, spans: list[SavedSpan]) -> None:
        """Have more go, the first first."""
        small = SavedSizes.of(self.choice.sizes).small
        for span in spans:
            missing = self.choice.missing
            store = self._destination.store(span.source.device) if span.source is not None else None
            going = span.size if span.size <= missing else piece_of(missing)
            if store is None or span.stays or span.parcel is not None or span.size <= small or going <= 0:
                continue
            self._send(span, store, going)
            self.choice.gone += going

    def bring(self, span: SavedSpan, place: int) -> tuple[torch.UntypedStorage, int]:
        """Return the storage that has the bytes of ``span``, and where in the original one it begins, in bytes.

        ``place`` is that of the tensor that is wanted. Others are brought back ahead. What was brought is held until
        each tensor that views it has been asked for.
        """
        with self._lock:
            self.began_backward = True
            self.choice.is_over = True
            span.check()
            if span.source is not None:
                self._bring_ahead(place, least=0)
                return span.source.untyped_storage(), span.source_begin
            if span.is_spent:
                self._begin_again()
            room = self._arrived(span)
            self._bring_ahead(place, least=1)
            span.served += 1
            if span.served >= span.handles:
                span.served, span.is_spent = 0, True
                assert span.parcel is not None
                span.parcel.room = None
                self._hold(span)
            return room.untyped_storage(), span.begin

    def _arrived(self, span: SavedSpan) -> torch.Tensor:
        """Return the room that holds the bytes of ``span``, when whoever asks may use it."""
        parcel = span.parcel
        assert parcel is not None
        if parcel.room is None:
            self._fetch(span)
        began = time.perf_counter()
        parcel.ready()
        if self._trace is not None and time.perf_counter() - began > STALL_SECONDS:
            self._trace.add("activations: stall", "stall", began)
        assert parcel.room is not None
        return parcel.room

    def _fetch(self, span: SavedSpan) -> None:
        """Start bringing ``span`` back."""
        assert span.parcel is not None
        span.parcel.fetch()
        self._hold(span)

    def _bring_ahead(self, place: int, *, least: int) -> None:
        """Start bringing back what was saved before ``place``, the last first: ``least`` of them, and what has room."""
        if place > self._last_place:
            self._ahead = place  # another backward pass, or another branch
        coming = self._ahead < place
        self._last_place, self._ahead = place, min(self._ahead, place)
        while (span := self._next_away()) is not None:
            if (coming or not least) and self._held_now() + span.size > self.choice.staying:
                return
            try:
                self._fetch(span)
            except BudgetError:
                return  # what is needed now is there; this one is asked for again in its turn
            coming = True

    def _begin_again(self) -> None:
        """Begin another backward pass over the same graph: all that was served is wanted again."""
        for reference in self._order:
            if (span := reference()) is not None:
                span.is_spent = False

    def _next_away(self) -> SavedSpan | None:
        """Return what is away, and still wanted, of all before those that were brought ahead, the last saved first.

        An operation may ask for what it saved in the order of saving, and holds all of it until it is done.
        """
        while self._ahead > 0:
            span = self._order[self._ahead - 1]()
            if span is not None and span.is_away and not span.is_spent:
                return span
            self._ahead -= 1
        return None
