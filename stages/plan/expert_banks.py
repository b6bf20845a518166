"""How slots are divided among the layers of a mixture, and which share of a layer's experts that is likely to keep.

A layer that is called has slots for all experts that it is called for, so that some can come while others compute.
Where those of each layer are as many, each has a bank of its own, and keeps what it holds. Where there are fewer,
layers share one: the one that runs pushes out what the one before it brought, which will be wanted last, and what the
bank holds beyond one call is kept for the others.

Slots are empty at first. What the prompts and the first tokens are routed to fills them, and until then more is brought
than ever after. Prompts that use more experts than a bank holds leave none there that is whole: these pass through it
tensor by tensor.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise


def wanted(count: int, per_token: int, tokens: int) -> float:
    """Return how many of ``count`` experts so many ``tokens`` of one pass are expected to use, routed uniformly."""
    return count * (1 - (1 - per_token / count) ** tokens)


def bank_bounds(slots: int, *, layers: int, largest: int, together: int) -> list[tuple[int, int]]:
    """Return where the banks of ``slots`` begin and end; the layers are dealt to them in turn.

    ``largest`` is the most that a layer has, ``together`` the experts that one call is expected to use: a bank holds
    these twice over, so that some can come while others compute, and as many banks as ``layers`` are enough. Where all
    have a slot, each layer has those of its own.
    """
    slots = min(slots, layers * largest)
    whole = slots == layers * largest
    banks = layers if whole else max(1, min(layers, slots // max(1, 2 * together)))
    edges = [slots * number // banks for number in range(banks + 1)]
    return list(pairwise(edges))


def kept_share(slots: int, *, layers: int, count: int, used: float, before: float = math.inf, passes: int = 0) -> float:
    """Return which share of its ``count`` experts each of ``layers`` finds in ``slots`` as it is called, on average.

    A call is expected to use so many: ``used``. Routing is uniform, so a wanted expert is one of those as often as any.
    The mean is that over so many ``passes``, ``before`` which so many of a layer's experts were used; 0: of slots that
    are full.
    """
    bounds = bank_bounds(slots, layers=layers, largest=count, together=round(used))
    members = Counter(layer % len(bounds) for layer in range(layers))
    kept = 0.0
    for number, (begin, end) in enumerate(bounds):
        most = min(count, _kept_each(end - begin, members[number], used))
        left = before if before <= end - begin else 0.0
        kept += members[number] * _while_filling(most, count=count, used=used, before=left, passes=passes)
    return kept / (layers * count)


def _while_filling(most: float, *, count: int, used: float, before: float, passes: int) -> float:
    """Return how many of ``count`` experts are in slots as a layer is called, on average over ``passes``.

    At first those that were left ``before`` are, and each pass adds those that it had to bring, up to ``most``.
    """
    kept, total = min(most, before), 0.0
    for passed in range(passes):
        if kept >= most:
            return (total + most * (passes - passed)) / passes
        total += kept
        kept = min(most, kept + used * (1 - kept / count))
    return total / passes if passes else most


def _kept_each(size: int, layers: int, used: float) -> float:
    """Return how many experts each of ``layers`` has in a bank of ``size`` slots as it is called, and uses ``used``."""
    if size >= layers * used:
        return size / layers
    return max(0.0, size - used) / (layers - 1) if layers > 1 else 0.0
