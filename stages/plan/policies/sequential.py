"""``sequential``: device after device, in the order of execution."""

from __future__ import annotations

from stages.plan.filling import fill, place
from stages.plan.outline import Outline
from stages.plan.placement import Budgets, Placement


def sequential(outline: Outline, budgets: Budgets) -> Placement:
    """Return the placement that fills each device before it goes on to the next, and never goes back."""
    return place(outline, budgets, fill)
