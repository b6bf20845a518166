"""Which of the sequences that a model is given share a call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence


def by_length(lengths: Sequence[int], *, size: int | None, padded: bool = True) -> list[list[int]]:
    """Return the places of sequences of these ``lengths`` in batches of at most ``size`` (null: of any number).

    Those of a batch have like lengths, so that little of it is padding; unless they can be ``padded``, one length. In a
    batch they keep their order; the batches with the longest come first, so that what doesn't fit shows at once.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for place, length in enumerate(lengths):
        groups[0 if padded else length].append(place)
    batches = []
    for group in groups.values():
        step = size or len(group)
        longest_first = sorted(group, key=lambda place: -lengths[place])
        batches += [sorted(longest_first[start : start + step]) for start in range(0, len(group), step)]
    return batches
