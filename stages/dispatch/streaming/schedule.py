"""In which order streamed parts are used, and which of them were asked for ahead of use.

The order begins as the rehearsal's and is corrected by what a whole pass really did. A part that is called out of
order, twice, or not at all is no error: only less is known ahead.

A backward pass asks again for the parts whose weights its forward had saved: at first they are expected in the reverse
order, then as the last backward pass asked for them, which is another order where it computes parts of the forward
again. Forward and backward follow each other in the order like two halves of one pass.

It has what is certain alone. Parts that a forward decides to use (the experts of a mixture) are in no order, and
neither is one that a whole pass has left out, from then on: nobody knows before it is called that it will be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence


class Schedule:
    """A cyclic order of part numbers, the next step, and the first step not yet asked for.

    Those of ``order`` that are ``optional`` aren't in it. A step is a position in the endless repetition of the order:
    after the last part of a pass comes the first of the next one, or of the backward pass that is expected between.
    """

    def __init__(self, order: Sequence[int], optional: Collection[int] = ()) -> None:
        self._optional = set(optional)
        self._forward = [part for part in order if part not in self._optional]
        self._backward: list[int] = []  # what comes between a pass and the next one
        self._saved: list[int] = []  # what the pass had saved that this followed
        self._ended: int | None = None  # how many parts the pass had used when it ended
        self._turns = 0
        self._step = 0
        self._asked = 0
        self._wanted: Counter[int] = Counter()
        self._seen: list[int] = []

    @property
    def order(self) -> list[int]:
        """The parts of one pass, in the order in which they are expected, and those of the backward after it."""
        return self._forward + self._backward

    def upcoming(self) -> Iterator[int]:
        """Yield the parts to ask for next, at most one pass ahead.

        A part counts as asked for when the one after it is drawn, so that a caller who breaks off is offered the
        same part again.
        """
        while self._asked < self._step + self._length:
            part = self._at(self._asked)
            yield part
            self._wanted[part] += 1
            self._asked += 1

    def wanted(self, part: int) -> bool:
        """Return whether ``part`` is among the steps that were asked for and not yet used."""
        return self._wanted[part] > 0

    def use(self, part: int) -> None:
        """Note that ``part`` is used now. One that comes early skips what stood before it."""
        if part in self._optional:
            return
        self._seen.append(part)
        for ahead in range(self._length):
            if self._at(self._step + ahead) == part:
                self._skip_to(self._step + ahead + 1)
                return

    def begin_pass(self) -> bool:
        """Begin a pass of the model: the next part is the first. Return whether another order is expected now.

        What was used since the last pass ended is what a backward pass asked for, if there was one.
        """
        followed = self._seen[self._ended :] if self._turns and self._ended is not None else []
        self._seen, self._ended, self._turns = [], None, 0
        if followed != self._backward:
            self._turn_to(followed, step=0)
            return True
        if self._length:
            self._skip_to(-(-self._step // self._length) * self._length)
        return False

    def end_pass(self) -> bool:
        """End a whole pass: from now on its order is what was seen. Return whether that is another order.

        What was left out is optional from now on.
        """
        seen, self._ended = self._seen, len(self._seen)
        if not seen or seen == self._forward:
            return False
        self._optional.update(set(self._forward) - set(seen))
        self._forward = list(seen)
        self._turn_to([], step=0)
        return True

    def turn(self, saved: Iterable[int]) -> bool:
        """Begin the backward of a pass that ``saved`` these parts, in this order. Return whether that was not expected.

        The first backward after a pass is expected where the last one of a pass that saved the same was.
        """
        certain = [part for part in saved if part not in self._optional]
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
        self.ask_again()

    def ask_again(self) -> None:
        """Forget what was asked for: it was given up, or is asked for in another order."""
        self._asked = self._step
        self._wanted.clear()

    @property
    def _length(self) -> int:
        return len(self._forward) + len(self._backward)

    def _at(self, step: int) -> int:
        place = step % self._length
        return self._forward[place] if place < len(self._forward) else self._backward[place - len(self._forward)]

    def _skip_to(self, step: int) -> None:
        for used in range(self._step, min(step, self._asked)):
            self._wanted[self._at(used)] -= 1
        self._step = step
        self._asked = max(self._asked, step)
