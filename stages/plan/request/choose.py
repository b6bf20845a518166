"""How many prompts compute together where that is ours to choose: the size of batches, and how many go in lockstep.

A batch reads weights once for all of its sequences, so larger ones take fewer passes. Batches in lockstep share a pass
too, each computing what it computes alone. Either costs memory: where budgets are given, that which they leave; where
they are worked out, that of weights, which then stream. What it saves ends where computing takes longer than bringing
weights does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offstage.stages.empty_init.skeleton import Skeleton
from offstage.stages.plan.allocator import AllocatorCost
from offstage.stages.plan.budgets import NO_COST
from offstage.stages.plan.plan import Plan

LARGEST_BATCH = 256
"""No batch has more prompts: a kill loses no more than one batch, and none waits for the slowest of thousands."""

MOST_TOGETHER = 64
"""No more batches go together: beyond, computing takes longer than any storage."""

COPIED_BYTES = 1 << 20
"""The largest tensor of a module that each call in lockstep has a copy of, where calls change it in place."""

ALIKE = 1.05
"""Predicted times that are no further apart are alike."""


def batch_sizes(count: int) -> list[int]:
    """Return the sizes that are tried for ``count`` prompts, the largest first: two to each doubling, and all of them.

    Few, so that memory that is a little freer than a minute ago doesn't make another plan.
    """
    most = max(1, min(count, LARGEST_BATCH))
    steps = {size for power in range(most.bit_length()) for size in (2**power, 3 * 2**power // 2)}
    return sorted({most, *(size for size in steps if size <= most)}, reverse=True)


def lockstep_sizes(count: int) -> list[int]:
    """Return the numbers that are tried for ``count`` batches, the largest first: each doubling, and all of them."""
    most = max(1, min(count, MOST_TOGETHER))
    return sorted({most, *(2**power for power in range(most.bit_length()))}, reverse=True)


def why_not_in_lockstep(skeleton: Skeleton) -> str:
    """Return why calls of the model that ``skeleton`` describes can't go together, by its rehearsal; else nothing."""
    large = next((name for name in skeleton.written if skeleton.by_name[name].bytes > COPIED_BYTES), None)
    if large is None:
        return ""
    return f"one after another, not in lockstep: the model's own code changes {large!r} in place"


@dataclass(frozen=True, slots=True)
class PlanOption:
    """A plan for one of the sizes, null where there is none to choose, and the ``seconds`` in which all that is asked
    gets a token under it. ``allocator`` is what torch's takes of an accelerator beside its request.
    """

    size: int | None
    plan: Plan
    seconds: float
    allocator: AllocatorCost = NO_COST


def choose(options: Sequence[PlanOption], *, fewest: bool) -> PlanOption:
    """Return that of the least seconds of ``options``.

    Of those that are alike within a twentieth it is that of the ``fewest``, where more would bring nothing; or else the
    one that streams the least, then that of the largest batch: beside a budget that is given, where the size moves no
    weight, that is the largest that fits.
    """
    least = min(option.seconds for option in options)

    def order(option: PlanOption) -> tuple[float, int]:
        size, streamed = option.size or 1, float(option.plan.forecast["streamed_bytes_per_token"])
        return (0.0, size) if fewest else (streamed, -size)

    return min((option for option in options if option.seconds <= least * ALIKE), key=order)


def brings_more(option: PlanOption, others: Sequence[PlanOption]) -> bool:
    """Return whether tokens come sooner under ``option`` than under all ``others``, by more than is alike."""
    return option.seconds * ALIKE < min(other.seconds for other in others)
