"""The blocks of rows that a weight larger than the budget comes in."""

from __future__ import annotations

LEAST_ROWS = 1024
"""The rows of the smallest block, the last two aside. Each has a power of two times as many."""


def row_ranges(count: int, rows: int) -> list[range]:
    """Return ``count`` rows in blocks of ``rows``, a power of two. None has less than half as many, or all ``count``:
    a short rest is evened out with the block before it.
    """
    ends = [*range(rows, count, rows), count]
    if len(ends) > 1 and count - ends[-2] < rows // 2:
        ends[-2] -= rows // 2
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
