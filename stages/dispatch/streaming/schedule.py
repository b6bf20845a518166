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

from collections.abc import Collection, Iterable, Sequence

_ROUTES = 4
"""So many orders are known beside that of a pass: of an encoder, of the first pass of a prompt with images, …"""


class Schedule:
    """A cyclic order of part numbers, the next step, and the first step not yet asked for.

    ``order`` are the parts of one pass, as they are expected, and those of the backward after it. Those of the order
    that is given that are ``optional`` aren't in it. A step is a position in the endless repetition of the order:
    after the last part of a pass comes the first of the next one, or of the backward pass that is expected between.
    What was left out and is used now comes before that, as far as it is known what follows it.
    """

    def __init__(self, order: Sequence[int], optional: Collection[int] = ()) -> None:
        self._optional = frozenset(optional)
        self._forward = [part for part in order if part not in self._optional]
        self._backward: list[int] = []  # what comes between a pass and the next one
        self._saved: list[int] = []  # what the pass had saved that this followed
        self._left_out: set[int] = set()  # what no pass is expected to use
        self._routes: list[list[int]] = []  # what was used where some of that was used, the latest first
        self.order = self._forward  # and what comes between
        self._beside: list[int] = []  # the rest of one of them that is expected now
        self._beside_asked = 0
        self._again: set[int] = set()  # what was left out, and used by the last pass all the same
        self._in_pass = self._is_known = False  # the order is known once a whole pass was seen
        self._ended: int | None = None  # how many parts the pass had used when it ended
        self._turns = 0
        self._step = 0
        self._asked = 0
        self._wanted: dict[int, int] = {}
        self._seen: list[int] = []

    def next_to_ask(self) -> int | None:
        """Return the part to ask for next, at most one pass ahead; null where all that is known was asked for."""
        if self._beside_asked < len(self._beside):
            return self._beside[self._beside_asked]
        order = self.order
        return order[self._asked % len(order)] if self._asked < self._step + len(order) else None

    def note_asked(self, part: int) -> None:
        """Note that ``part``, which was next, was asked for."""
        self._wanted[part] = self._wanted.get(part, 0) + 1
        if self._beside_asked < len(self._beside):
            self._beside_asked += 1
        else:
            self._asked += 1

    def expected(self) -> list[int]:
        """Return the parts from the next one on, at most one pass ahead."""
        begun = self._step % len(self.order) if self.order else 0
        return [*self._beside, *self.order[begun:], *self.order[:begun]]

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
        if part in self._beside:
            self._keep_beside(self._beside[self._beside.index(part) + 1 :])
            return False
        if self._beside:
            self._keep_beside([])
        if part in self._left_out:
            return self._follow_route(part)
        order, step = self.order, self._step
        for ahead in range(len(order)):
            if order[(step + ahead) % len(order)] == part:
                self._skip_to(step + ahead + 1)
                break
        return False

    def _follow_route(self, part: int) -> bool:
        """Expect what followed ``part``, which was left out, the last time, and then the next pass, or the backward of
        this one. Return whether something did.
        """
        route = next((route for route in self._routes if part in route), [part])
        rest = route[route.index(part) + 1 :]
        if not rest:
            return False
        begun = self._step % len(self.order) if self.order else 0
        is_over = not begun and not self._left_out.issuperset(self._seen)
        if self._in_pass and begun < len(self._forward) and not is_over:
            self._skip_to(self._step - begun + len(self._forward))
        self.ask_again()
        self._beside = rest
        return True

    def _note_route(self, used: Sequence[int]) -> None:
        """Note the order in which parts were ``used``, if some of them were left out."""
        if not self._left_out.isdisjoint(used):
            self._routes = [[*used], *(route for route in self._routes if route != used)][:_ROUTES]

    def _keep_beside(self, parts: list[int]) -> None:
        """Expect no more of a route than ``parts``, the last of what was expected of it."""
        past = len(self._beside) - len(parts)
        for part in self._beside[: min(past, self._beside_asked)]:
            self._wanted[part] -= 1
        self._beside, self._beside_asked = parts, max(0, self._beside_asked - past)

    def begin_pass(self) -> bool:
        """Begin a pass of the model: the next part is the first. Return whether another order is expected now.

        What was used since the last pass ended is what a backward pass asked for, if there was one, and else what was
        entered from outside.
        """
        used = self._seen[self._ended or 0 :]
        since = [part for part in used if part not in self._left_out]
        followed = since if self._turns and self._ended is not None else []
        is_outside = bool(used) and not self._turns and not self._in_pass
        self._seen, self._ended, self._turns, self._in_pass = [], None, 0, True
        self._keep_beside([])
        if is_outside:
            self._note_route(used)
        if followed != self._backward:
            self._turn_to(followed, step=0)
            return True
        if is_outside and not self._is_known and since and not {*since} >= {*self._forward}:
            self._leave_out(since)
            self._note_route(used)
            self._turn_to([], step=0)
            return True
        if self.order:
            self._skip_to(-(-self._step // len(self.order)) * len(self.order))
        return False

    def end_pass(self) -> bool:
        """End a whole pass: from now on its order is what was seen. Return whether that is another order.

        What was left out is expected in no pass from now on.
        """
        seen, self._ended, self._in_pass, self._is_known = self._seen, len(self._seen), False, True
        besides = self._left_out.intersection(seen)
        self._left_out -= besides & self._again
        self._again = besides
        self._note_route(seen)
        certain = [part for part in seen if part not in self._left_out]
        if not certain or certain == self._forward:
            return False
        self._leave_out({*self._forward}.difference(certain))
        self._forward = certain
        self._turn_to([], step=0)
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
        known = certain == self._saved and bool(self._backward)
        if known and self._turns == 1:
            return False
        self._saved = certain
        self._turn_to(self._backward if known else certain[::-1], step=len(self._forward))
        return True

    def _turn_to(self, backward: list[int], *, step: int) -> None:
        """Expect ``backward`` after each pass, and next what is at ``step``."""
        self._backward, self._step = backward, step
        self.order = self._forward + self._backward
        self.ask_again()

    def ask_again(self) -> None:
        """Forget what was asked for: it was given up, or is asked for in another order."""
        self._asked, self._beside_asked = self._step, 0
        self._wanted.clear()

    def _skip_to(self, step: int) -> None:
        for used in range(self._step, min(step, self._asked)):
            self._wanted[self.order[used % len(self.order)]] -= 1
        self._step = step
        self._asked = max(self._asked, step)
