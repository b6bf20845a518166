"""The policies: pure functions from an outline and budgets to a placement, one file each."""

from collections.abc import Callable, Mapping

from stages.plan.outline import Outline
from stages.plan.placement import Budgets, Placement
from stages.plan.policies.balanced import balanced
from stages.plan.policies.balanced_low_0 import balanced_low_0
from stages.plan.policies.optimal import optimal
from stages.plan.policies.sequential import sequential

Policy = Callable[[Outline, Budgets], Placement]

POLICIES: Mapping[str, Policy] = {
    "auto": balanced,
    "balanced": balanced,
    "balanced_low_0": balanced_low_0,
    "optimal": optimal,
    "sequential": sequential,
}
