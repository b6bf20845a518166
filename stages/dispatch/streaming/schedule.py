"""In which order streamed parts are used, and which of them were asked for ahead of use.

The order begins as the rehearsal's and is corrected by what a whole pass really did. A part that is called out of
order, twice, or not at all is no error: only less is known ahead.

A module that is entered from outside has an order of its own, beside that of a pass: ``generate`` calls an encoder once
and then a decoder for each token; an image tower, or what an encoder's states become for the decoder, runs in the first
pass of a prompt alone. What a whole pass leaves out, or is called outside of all passes, is expected in no pass any
more; but once a part of it is used, so is all that followed it the last time, and then the next pass. A part that two
passes in turn have used is expected in each pass again.

A backward pass asks again for the parts whose weights its forward had saved: at first they are expected in the reverse
order, then as the last backward pass asked for them, which is another order where it computes parts of the forward
again. Forward and backward follow each other in the order like two halves of one pass.

Parts that a forward decides to use (the experts of a mixture) are in no order: nobody knows before one is called that
it will be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import islice

_ROUTES = 4
"""So many orders are known beside that of a pass: of an encoder, of the first pass of a prompt with images, …"""


class Schedule:
    """A cyclic order of part numbers, what is expected next, and how much of that was asked for.

    ``order`` are the parts of one pass, as they are expected, and those of the backward after it. Those of the order
    that is given that are ``optional`` aren't in it. Expected is all of the order once, from the next part on: after
    the last part of a pass comes the first of the next one, or of the backward pass that is expected between. What was
    left out and is used now comes before that, as far as it is known what follows it.
    """

    def __init__(self, order: Sequence[int], optional: Collection[int] = ()) -> None:
        self._optional = frozenset(optional)
        self._forward = [part for part in order if part not in self._optional]
        self._backward: list[int] = []  # what comes between a pass and the next one
        self._saved: list[int] = []  # what the pass had saved that this followed
        self._left_out: set[int] = set()  # what no pass is expected to use
        self._routes: list[list[int]] = []  # what was used where some of that was used, the latest first
        self.order = self._forward  # and what comes between
        self._ahead = deque(self.order)  # the rest of such a route, and then all of the order, from ``_begun`` on
        self._begun = 0
        self._asked = 0  # so many of these
        self._wanted: dict[int, int] = {}
        self._again: set[int] = set()  # what was left out, and used by the last pass all the same
        self._is_known = False  # the order, once a whole pass was seen
        self._ended: int | None = 0  # how many parts the pass had used when it ended; null in a pass
        self._turns = 0
        self._seen: list[int] = []

    def next_to_ask(self) -> int | None:
        """Return the part to ask for next, at most one pass ahead; null where all that is known was asked for."""
        return self._ahead[self._asked] if self._asked < len(self._ahead) else None

    def note_asked(self, part: int) -> None:
        """Note that ``part``, which was next, was asked for."""
        self._wanted[part] = self._wanted.get(part, 0) + 1
        self._asked += 1

    def expected(self) -> list[int]:
        """Return the parts from the next one on, at most one pass ahead."""
        return [*self._ahead]

    def wanted(self, part: int) -> bool:
        """Return whether ``part`` is among the steps that were asked for and not yet used."""
        return self._wanted.get(part, 0) > 0

    def use(self, part: int) -> bool:
        """Note that ``part`` is used now; return whether others are expected now than before.

        One that comes early skips what stood before it.
        """
        if part in self._optional:
            return False
        self._seen.append(part)
        if part in self._ahead:
            self._skip(self._ahead.index(part) + 1)
            return False
        self._skip(self._on_route)
        return part in self._left_out and self._follow_route(part)

    @property
    def _on_route(self) -> int:
        """How many parts are expected before those of the order."""
        return len(self._ahead) - len(self.order)

    def _skip(self, count: int) -> None:
        """Expect the next ``count`` parts no more; of the order they come again after the others."""
        for _ in range(count):
            of_order, part = not self._on_route, self._ahead.popleft()
            if self._asked:
                self._asked -= 1
                self._wanted[part] -= 1
            if of_order:
                self._ahead.append(part)
                self._begun = (self._begun + 1) % len(self.order)

    def _follow_route(self, part: int) -> bool:
        """Expect what followed ``part``, which was left out, the last time, and then the next pass, or the backward of
        this one. Return whether something did.
        """
        route = next((route for route in self._routes if part in route), [part])
        rest = route[route.index(part) + 1 :]
        if not rest:
            return False
        is_over = not self._begun and not self._left_out.issuperset(self._seen)
        if self._ended is None and not is_over:
            self._skip(max(0, len(self._forward) - self._begun))
        self.ask_again()
        self._ahead.extendleft(reversed(rest))
        return True

    def _note_route(self, used: Sequence[int]) -> None:
        """Note the order in which parts were ``used``, if some of them were left out."""
        if not self._left_out.isdisjoint(used):
            self._routes = [[*used], *(route for route in self._routes if route != used)][:_ROUTES]

    def begin_pass(self) -> bool:
        """Begin a pass of the model: the next part is the first. Return whether another order is expected now.

        What was used since the last pass ended is what a backward pass asked for, if there was one, and else what was
        entered from outside.
        """
        used = self._seen[self._ended or 0 :]
        since = [part for part in used if part not in self._left_out]
        followed = since if self._turns and self._ended is not None else []
        is_outside = bool(used) and not self._turns and self._ended is not None
        self._seen, self._ended, self._turns = [], None, 0
        self._skip(self._on_route)
        if is_outside:
            self._note_route(used)
        if followed != self._backward:
            self._turn_to(followed, begun=0)
            return True
        if is_outside and not self._is_known and since and not {*since} >= {*self._forward}:
            self._leave_out(since)
            self._note_route(used)
            self._turn_to([], begun=0)
            return True
        self._skip(len(self.order) - self._begun if self._begun else 0)
        return False

    def end_pass(self) -> bool:
        """End a whole pass: from now on its order is what was seen. Return whether that is another order.

        What was left out is expected in no pass from now on.
        """
        seen, self._ended, self._is_known = self._seen, len(self._seen), True
        besides = self._left_out.intersection(seen)
        self._left_out -= besides & self._again
        self._again = besides
        self._note_route(seen)
        certain = [part for part in seen if part not in self._left_out]
        if not certain or certain == self._forward:
            return False
        self._leave_out({*self._forward}.difference(certain))
        self._forward = certain
        self._turn_to([], begun=0)
        return True

    def _leave_out(self, parts: Collection[int]) -> None:
        """Expect ``parts`` in no pass any more."""
        self._left_out.update(parts)
        self._note_route(self._forward)
        self._forward = [part for part in self._forward if part not in self._left_out]

    def turn(self, saved: Iterable[int]) -> bool:
        """Begin the backward of a pass that ``saved`` these parts, in this order. Return whether that was not expected.

        The first backward after a pass is expected where the last one of a pass that saved the same was.
        """
        certain = [part for part in saved if part not in self._optional and part not in self._left_out]
        self._turns += 1
        is_expected = certain == self._saved and bool(self._backward)
        if is_expected and self._turns == 1:
            return False
        self._saved = certain
        self._turn_to(self._backward if is_expected else certain[::-1], begun=len(self._forward))
        return True

    def _turn_to(self, backward: list[int], *, begun: int) -> None:
        """Expect ``backward`` after each pass, and next what is in the order after as many as have ``begun``."""
        route = [*islice(self._ahead, self._on_route)]
        self._backward, self.order = backward, self._forward + backward
        self._begun = begun % len(self.order) if self.order else 0
        self._ahead = deque([*route, *self.order[self._begun :], *self.order[: self._begun]])
        self.ask_again()

    def ask_again(self) -> None:
        """Forget what was asked for: it was given up, or is asked for in another order."""
        self._asked = 0
        self._wanted.clear()
