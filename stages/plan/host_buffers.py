"""The host memory that weights pass through on their way from storage to where they are used."""

from __future__ import annotations

from offstage.stages.machine.probes import READING_THREADS

PINNED_BYTES = 16 * 2**20
"""What those for an accelerator pass through."""


def bounce_buffers(size: int) -> int:
    """Return how many buffers of ``size`` bytes experts pass through: one for each thread, fewer where it is large."""
    return max(1, min(READING_THREADS, round(PINNED_BYTES / size)))


def bounce_bytes(size: int) -> int:
    """Return what buffers of ``size`` bytes take together; none where experts pass through none."""
    return bounce_buffers(size) * size if size else 0
