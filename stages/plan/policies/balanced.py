"""``balanced``: the same load on every accelerator, as far as the layers allow it."""

from __future__ import annotations

from offstage.stages.plan.filling import fill, place
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.placement import Budgets, Homes, Placement
from offstage.stages.plan.policies.spreading import accelerators, limit


def balanced(outline: Outline, budgets: Budgets) -> Placement:
    """Return the placement in order of execution whose most loaded accelerator has the least load possible.

    The accelerators hold as much as under ``sequential``: evenness never costs a layer its place.
    """
    return place(outline, budgets, _fill)


def _fill(outline: Outline, budgets: Budgets) -> Homes:
    return fill(outline, limit(outline, budgets, accelerators(budgets)))
