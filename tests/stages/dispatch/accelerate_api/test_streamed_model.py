"""What the field's functions have of a mixture in slots: what its largest layer took before, or what budgets leave."""

from __future__ import annotations

import pytest

from offstage.stages.dispatch.accelerate_api.streamed_model import Wanted, plan_for
from offstage.stages.empty_init.skeleton import Skeleton
from offstage.stages.plan.plan import Plan
from offstage.stages.units import CPU, DISK, DeviceId
from tests.stages.plan.mixtures import mixture
from tests.stages.plan.plans import of

MODEL = mixture("Mixtral")
EXPERT = MODEL.expert_kinds[next(iter(MODEL.experts))].bytes


def planned(skeleton: Skeleton, main: DeviceId, away: DeviceId, **changes: object) -> Plan:
    homes = {spec.name: away if spec.name in MODEL.expert_tensors else main for spec in skeleton.tensors}
    return plan_for(skeleton, Wanted(homes, main, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(("main", "away"), [(CPU, DISK), (0, CPU), (0, DISK)])
def test_a_layer_of_experts_has_slots_where_nothing_says_how_much_there_is(main: DeviceId, away: DeviceId) -> None:
    plan = planned(MODEL.skeleton, main, away)
    assert set(plan.serving.values()) == {"experts"}
    assert of(plan, "reserve") == {}
    layers = 2 if main == CPU else 1
    assert of(plan, "expert_cache") == {main: layers * 6 * EXPERT}
    budget = plan.budgets[main]
    assert budget is not None
    assert plan.devices[main].weights + plan.devices[main].expert_cache <= budget


@pytest.mark.parametrize("main", [CPU, 0])
def test_what_a_budget_leaves_is_slots(main: DeviceId) -> None:
    dense_bytes = sum(MODEL.sizes[name] for name in MODEL.sizes if name not in MODEL.expert_tensors)
    plan = planned(MODEL.skeleton, main, DISK, budgets={main: dense_bytes + 4 * EXPERT + 1})
    assert of(plan, "expert_cache") == {main: 4 * EXPERT}


def test_experts_in_a_module_that_is_preloaded_come_as_a_whole() -> None:
    (block,) = {module.class_name for module in MODEL.skeleton.modules if module.name == "model.layers.0"}
    plan = planned(MODEL.skeleton, CPU, DISK, preload=[block])
    assert (set(plan.serving.values()) <= {"direct", "map"}, of(plan, "expert_cache")) == (True, {})
