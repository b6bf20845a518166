"""How slots are divided among the layers of a mixture, and which share of a layer's experts that is likely to keep.

A layer that is called has slots for all experts that it is called for, so that some can come while others compute.
Where those of each layer are as many, each has a bank of its own, and keeps what it holds. Where there are fewer,
layers share one: the one that runs pushes out what the one before it brought, which will be wanted last, and what the
bank holds beyond one call is kept for the others.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise


def wanted(count: int, per_token: int, tokens: int) -> float:
    """Return how many of ``count`` experts so many ``tokens`` of one pass are expected to use, routed uniformly."""
    return count * (1 - (1 - per_token / count) ** tokens)


def bank_bounds(slots: int, *, layers: int, largest: int, together: int) -> list[tuple[int, int]]:
    """Return where the banks of ``slots`` begin and end; the layers are dealt to them in turn.

    ``largest`` is the most that a layer has, ``together`` the experts that one call is expected to use: a bank holds
    these twice over, so that some can come while others compute, and as many banks as ``layers`` are enough.
    """
    slots = min(slots, layers * largest)
    banks = max(1, min(layers, slots // max(1, 2 * together)))
    edges = [slots * number // banks for number in range(banks + 1)]
    return list(pairwise(edges))


def kept_share(slots: int, *, layers: int, count: int, used: float) -> float:
    """Return which share of its ``count`` experts each of ``layers`` finds in ``slots`` as it is called, on average.

    A call is expected to use so many: ``used``. Routing is uniform, so a wanted expert is one of those as often as any.
    """
    bounds = bank_bounds(slots, layers=layers, largest=count, together=round(used))
    members = Counter(layer % len(bounds) for layer in range(layers))
    kept = sum(
        members[number] * min(count, _kept_each(end - begin, members[number], used))
        for number, (begin, end) in enumerate(bounds)
    )
    return kept / (layers * count)


def _kept_each(size: int, layers: int, used: float) -> float:
    """Return how many experts each of ``layers`` has in a bank of ``size`` slots as it is called, and uses ``used``."""
    if size >= layers * used:
        return size / layers
    return max(0.0, size - used) / (layers - 1) if layers > 1 else 0.0
