"""``sequential``: device after device, in the order of execution."""

from __future__ import annotations

from offstage.stages.plan.filling import fill, place
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.placement import Budgets, Placement


def sequential(outline: Outline, budgets: Budgets) -> Placement:
    """Return the placement that fills each device before it goes on to the next, and never goes back."""
    return place(outline, budgets, fill)
