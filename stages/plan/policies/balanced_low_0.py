"""``balanced_low_0``: balanced, with the first accelerator left as free as it can be.

Room on it serves what grows during generation (the logits, a cache): it holds weights only where the others can't hold
them all.
"""

from __future__ import annotations

from offstage.stages.plan.filling import fill, place
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.placement import Budgets, Homes, Placement
from offstage.stages.plan.policies.spreading import accelerators, limit


def balanced_low_0(outline: Outline, budgets: Budgets) -> Placement:
    """Return the placement with the least on the first accelerator, and what is left balanced over the others."""
    return place(outline, budgets, _fill)


def _fill(outline: Outline, budgets: Budgets) -> Homes:
    found = accelerators(budgets)
    if len(found) < 2:
        return fill(outline, budgets)
    return fill(outline, limit(outline, limit(outline, budgets, found[:1]), found[1:]))
