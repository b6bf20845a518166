"""Which of the saved bytes go, so that their share of all is the ratio that was asked for.

What is saved first goes: the backward pass needs it last. So when it begins, at the peak, nothing has to come back, and
what has gone has the whole backward pass to return in, into memory that is free by then. How much "first" is follows
from the pass before: as much larger or smaller as this one is so far, so much it will be in the end. Where there is no
pass before, each moment is taken for the end, which spreads what goes evenly. The tensor on the border is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

TOLERANCE = 0.01
"""How far off the ratio may be, as a share of all bytes, before a tensor is split for it."""
SMALL_SHARE = 0.01
"""The smallest tensors stay, as many as have this share of the bytes together: a copy costs a call, of any size."""
PIECE = 64
"""A part of a tensor that goes is a multiple of so many bytes."""


@dataclass(frozen=True, slots=True)
class SavedSizes:
    """What a pass saved: ``sums`` has the bytes after each tensor; none larger than ``small`` is worth a copy."""

    sums: tuple[int, ...]
    small: int

    @classmethod
    def of(cls, sizes: Sequence[int]) -> SavedSizes:
        """Return what ``sizes``, in the order in which they were saved, come to."""
        ascending = sorted(sizes)
        spared = sum(sizes) * SMALL_SHARE
        small = 0
        for size, upto in zip(ascending, accumulate(ascending), strict=True):
            if upto > spared:  # of several of one size all stay or none
                return cls(tuple(accumulate(sizes)), small if small < size else small - 1)
            small = size
        return cls(tuple(accumulate(sizes)), small)


class ShareChoice:
    """Chooses, tensor by tensor, how many bytes go; counts those that are ``gone`` of the ``total`` so far."""

    def __init__(self, ratio: float, last: SavedSizes | None = None) -> None:
        self.ratio, self.gone = ratio, 0
        self.sizes: list[int] = []
        self.total = 0
        self.is_over = False
        self._last = last

    @property
    def small(self) -> int:
        """The largest size that isn't worth a copy."""
        if self._last is None:
            return PIECE
        smaller = min(1.0, self.expected / self._last.sums[-1])  # at its beginning a pass may be taken for any size
        return int(self._last.small * smaller)

    @property
    def expected(self) -> float:
        """How many bytes the pass will have saved at its end."""
        seen = len(self.sizes)
        if self._last is None or self.is_over or not 0 < seen <= len(self._last.sums):
            return self.total
        return max(self.total, self._last.sums[-1] * self.total / max(self._last.sums[seen - 1], 1))

    @property
    def staying(self) -> float:
        """How many of the expected bytes stay."""
        return (1 - self.ratio) * self.expected

    @property
    def missing(self) -> int:
        """How many more bytes should have gone, if the pass ended now; below 0 where too many have."""
        return round(self.ratio * self.total) - self.gone

    def choose(self, size: int, *, stays: bool = False) -> int:
        """Return how many of the next ``size`` bytes go; none where it is known that they stay."""
        self.sizes.append(size)
        self.total += size
        going = 0 if stays or size <= self.small else self._going(size)
        self.gone += going
        return going

    def _going(self, size: int) -> int:
        due, slack = self.ratio * self.expected - self.gone, TOLERANCE * self.expected
        if self._last is None:
            return size if 2 * due >= size else 0
        if 0 < due >= size - slack:  # of a ratio of 0 nothing goes, be it within the tolerance
            return size
        return 0 if due <= slack else piece_of(due)


def piece_of(count: float) -> int:
    """Return ``count`` bytes in whole pieces."""
    return int(count) // PIECE * PIECE
