"""The peaks of one training step as data: without torch, so that a plan has what was rehearsed once in milliseconds."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace

from offstage.pipeline.errors import BudgetError
from offstage.stages.units import format_bytes

SLACK = 0.01
"""How much less than its ratio an offload may put away, as a share of all that is saved."""
_RATIO_STEPS = 1000
"""A ratio that is worked out is a whole number of such parts."""

Moments = tuple[tuple[int, int, int], ...]
"""Moments of a step, in bytes: all that is held without offload; what autograd holds of it; and how much of that is
held even with all of it offloaded, since it is in use, or comes back next."""


@dataclass(frozen=True, slots=True)
class TrainingPeaks:
    """The bytes of one training step beside weights and inputs.

    ``saved_bytes`` are saved for the backward at the end of the forward; ``gradient_bytes`` are those of the weights'
    gradients. ``forward`` and ``backward`` have the moments of each pass that are the peak at some ratio of offload.
    """

    saved_bytes: int
    gradient_bytes: int
    forward: Moments
    backward: Moments = ()

    @property
    def forward_peak(self) -> int:
        """The most bytes held in the forward, without offload."""
        return max((live for live, _, _ in self.forward), default=0)

    def peak(self, ratio: float = 0.0) -> int:
        """Return the most bytes held in a step that offloads the share ``ratio``, 0 to 1, of what it saves.

        In the forward that share of what is saved so far is away, but for what is in use. In the backward it comes back
        ahead of use, as far as there is room: until as much is held as stayed.
        """
        stays = 1 - max(0.0, ratio - SLACK)
        forward = (live - (1 - stays) * (saved - needed) for live, saved, needed in self.forward)
        backward = (
            live - saved + min(saved, max(needed, stays * self.saved_bytes)) for live, saved, needed in self.backward
        )
        return max((math.ceil(live) for live in (*forward, *backward)), default=0)

    def least_ratio(self, budget: int) -> float:
        """Return the least ratio of activation offload whose peak is within ``budget`` bytes.

        A ``BudgetError`` where none is; it names the least budget that would do.
        """
        least = self.peak(1.0)
        if least > budget:
            raise BudgetError(
                f"a training step takes {format_bytes(least)} beside its weights with all of its activations offloaded,"
                f" and {format_bytes(budget)} ({budget} bytes) are left for it; give it {least} bytes or more, or make"
                " the batch smaller"
            )
        steps = range(_RATIO_STEPS + 1)
        return bisect_left(steps, True, key=lambda step: self.peak(step / _RATIO_STEPS) <= budget) / _RATIO_STEPS

    def lifted(self, lasting: int) -> TrainingPeaks:
        """Return these peaks with so many bytes more that are held all the time."""
        passes = (self.forward, self.backward)
        forward, backward = (tuple((one + lasting, saved, needed) for one, saved, needed in part) for part in passes)
        return replace(self, forward=forward, backward=backward)
