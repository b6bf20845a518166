"""In which order streamed parts are used, and which of them were asked for ahead of use.

The order begins as the rehearsal's and is corrected by what a whole pass really did. A part that is called out of
order, twice, or not at all is no error: only less is known ahead.

It has what is certain alone. Parts that a forward decides to use (the experts of a mixture) are in no order, and
neither is one that a whole pass has left out, from then on: nobody knows before it is called that it will be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence


class Schedule:
    """A cyclic order of part numbers, the next step, and the first step not yet asked for.

    Those of ``order`` that are ``optional`` aren't in it. A step is a position in the endless repetition of the order:
    after the last part of a pass comes the first of the next one.
    """

    def __init__(self, order: Sequence[int], optional: Collection[int] = ()) -> None:
        self._optional = set(optional)
        self._order = [part for part in order if part not in self._optional]
        self._step = 0
        self._asked = 0
        self._wanted: Counter[int] = Counter()
        self._seen: list[int] = []

    @property
    def order(self) -> list[int]:
        """The parts of one pass, in the order in which they are expected."""
        return list(self._order)

    def upcoming(self) -> Iterator[int]:
        """Yield the parts to ask for next, at most one pass ahead.

        A part counts as asked for when the one after it is drawn, so that a caller who breaks off is offered the
        same part again.
        """
        while self._asked < self._step + len(self._order):
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
        for ahead in range(len(self._order)):
            if self._at(self._step + ahead) == part:
                self._skip_to(self._step + ahead + 1)
                return

    def begin_pass(self) -> None:
        """Begin a pass of the model: the next part is the first."""
        self._seen.clear()
        if self._order:
            self._skip_to(-(-self._step // len(self._order)) * len(self._order))

    def end_pass(self) -> bool:
        """End a whole pass: from now on its order is what was seen. Return whether that is another order.

        What was left out is optional from now on.
        """
        seen, self._seen = self._seen, []
        if not seen or seen == self._order:
            return False
        self._optional.update(set(self._order) - set(seen))
        self._order = seen
        self._step = 0
        self.ask_again()
        return True

    def ask_again(self) -> None:
        """Forget what was asked for: it was given up, or is asked for in another order."""
        self._asked = self._step
        self._wanted.clear()

    def _at(self, step: int) -> int:
        return self._order[step % len(self._order)]

    def _skip_to(self, step: int) -> None:
        for used in range(self._step, min(step, self._asked)):
            self._wanted[self._at(used)] -= 1
        self._step = step
        self._asked = max(self._asked, step)
