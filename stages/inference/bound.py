"""What set the speed of forwards."""

from __future__ import annotations

from typing import Literal

Bound = Literal["storage", "link", "compute"]

STALL_SHARE = 0.1
"""Forwards that waited for at least this share of their seconds were held up by what they waited for."""


def bound_of(seconds: float, *, stall_seconds: float, storage_bytes: int) -> Bound:
    """Return what forwards of so many ``seconds`` waited for: reads from storage, the link, or neither: they computed.

    A forward that waits where nothing is read waits for copies. Where weights come from storage and from the host, the
    wait is put down to storage, the slower of the two. Pages of a mapped file that had to be read are not seen: a map
    is chosen where they stay in memory.
    """
    if stall_seconds < STALL_SHARE * seconds:
        return "compute"
    return "storage" if storage_bytes else "link"
