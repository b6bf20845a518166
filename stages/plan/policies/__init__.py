"""The policies: pure functions from an outline and budgets to a placement."""

from collections.abc import Callable, Mapping

from offstage.stages.plan.outline import Outline
from offstage.stages.plan.placement import Budgets, Placement
from offstage.stages.plan.policies.optimal import Search
from offstage.stages.plan.policies.whole_layers import balanced, balanced_low_0, sequential

Policy = Callable[[Outline, Budgets], Placement]

POLICIES: Mapping[str, Policy] = {
    "auto": balanced,
    "balanced": balanced,
    "balanced_low_0": balanced_low_0,
    "optimal": Search().optimal,
    "sequential": sequential,
}
