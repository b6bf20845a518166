"""Which calls of the model are over on a host: what is still sent or told of them is for nobody.

Calls are numbered from 0 up in what they are named after (``2`` of ``7.2``). So those that are over are told by a
number, and by few beyond it: a server remembers as much of all calls that it ever had as of those that are under way.
"""

from __future__ import annotations

from collections.abc import Iterator


def around(call: str) -> Iterator[str]:
    """Yield ``call``, and those that it is a part of, the outermost the last."""
    while call:
        yield call
        call = call.rpartition(".")[0]


class CallsOver:
    """The calls that are over, of those with a number in the one around them (``2`` of ``7.2``), each with its parts.

    Of one around them, all are over below its ``_first``, and those ``_beyond`` it: as few as others are under way.
    """

    def __init__(self) -> None:
        self._first: dict[str, int] = {}
        self._beyond: dict[str, set[int]] = {}

    def add(self, call: str) -> None:
        """Hear that ``call`` is over; its parts needn't be remembered any more."""
        for calls in (self._first, self._beyond):
            for inner in [inner for inner in calls if call in around(inner)]:
                del calls[inner]
        if call in self:
            return
        outer, _, number = call.rpartition(".")
        first, beyond = self._first.get(outer, 0), {*self._beyond.pop(outer, ()), int(number)}
        while first in beyond:
            beyond.remove(first)
            first += 1
        self._first[outer] = first
        if beyond:
            self._beyond[outer] = beyond

    def __contains__(self, call: str) -> bool:
        return any(self._has(*one.rpartition(".")[::2]) for one in around(call))

    def _has(self, outer: str, number: str) -> bool:
        if not number.isdecimal():  # what calls are named after has none
            return False
        return int(number) < self._first.get(outer, 0) or int(number) in self._beyond.get(outer, ())

    def __len__(self) -> int:
        """Return how many numbers it takes to tell them."""
        return len(self._first) + sum(map(len, self._beyond.values()))
