"""Which subsets of a layer's tensors come to how many bytes: what can be streamed of it, and what stays."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

_MOST_SUMS = 2048
"""How many subset sums of one layer are kept; a layer with more of them is solved approximately."""


@dataclass(frozen=True, slots=True)
class Sums:
    """The subset sums of a layer's tensors, ascending, each with the positions of the tensors that make it."""

    sums: Sequence[int]
    members: Sequence[frozenset[int]]

    def largest(self, limit: int) -> int:
        """Return the largest sum that is at most ``limit``."""
        return self.sums[bisect_right(self.sums, limit) - 1]

    def within(self, limit: int) -> frozenset[int]:
        """Return the positions of the tensors that make the largest sum that is at most ``limit``."""
        return self.members[bisect_right(self.sums, limit) - 1]


def subset_sums(sizes: Sequence[int]) -> Sums:
    """Return all sums of subsets of ``sizes``, or ``_MOST_SUMS`` of them, spread evenly, where there are more."""
    found: dict[int, frozenset[int]] = {0: frozenset()}
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        found |= {total + sizes[place]: chosen | {place} for total, chosen in found.items()} | found
        if len(found) > _MOST_SUMS:
            kept = sorted(found)
            step = len(kept) / _MOST_SUMS
            found = {kept[int(index * step)]: found[kept[int(index * step)]] for index in range(_MOST_SUMS)}
    whole = sum(sizes)
    found[whole] = frozenset(range(len(sizes)))
    return Sums(tuple(sorted(found)), tuple(found[total] for total in sorted(found)))
