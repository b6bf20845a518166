"""The batch size that ``auto`` comes to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from offstage.pipeline.errors import BudgetError
from offstage.stages.empty_init.skeleton import Moment
from offstage.stages.machine.hardware import coarse
from offstage.stages.machine.rates import Rates
from offstage.stages.plan.budgets import LEAST_MARGIN, LIBRARY_BYTES
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.plan import Plan
from offstage.stages.plan.request.choose import batch_sizes
from offstage.stages.units import parse_size
from tests.stages.plan.plans import make_plan
from tests.stages.plan.skeletons import stack

MB = 10**6
A_SEQUENCE = 10 * MB
"""What each sequence takes beside weights."""


def model(layers: int = 4, size: int = 100 * MB) -> Outline:
    """Return a model whose forward holds so much for each sequence."""
    moment = Moment((0, A_SEQUENCE, 0, 0, 0, 0))
    return Outline(replace(stack(layers, size).skeleton, moments=(moment,)))


def planned(memory: str, of: Outline | None = None, *, rates: Rates | None = None, **changes: Any) -> Plan:
    """Return the plan for many prompts on a host with so much ``memory``."""
    generate = {"prompts": [[1]] * 500, "batch_size": "auto", **changes.pop("generate", {})}
    config = {"max_memory": {}, "hardware": {"devices": [], "host": {"memory": memory}}, **changes}
    config |= {"generate": generate}
    return make_plan(of or model(), config, rates=rates)


def predicted_bytes(plan: Plan) -> int:
    return sum(plan.predicted["cpu"].values())


def test_sizes_are_two_to_a_doubling_and_all_at_once() -> None:
    assert batch_sizes(20) == [20, 16, 12, 8, 6, 4, 3, 2, 1]
    assert batch_sizes(1) == batch_sizes(0) == [1]
    assert batch_sizes(10_000)[:3] == [256, 192, 128]


WHOLE = {"cpu": "400MB"}
"""A budget that holds all weights."""


@pytest.mark.parametrize(("memory", "size"), [("2GiB", 128), ("1.5GiB", 64), ("1300MB", 32), ("800MB", 1)])
def test_beside_a_given_budget_it_is_the_largest_that_fits(memory: str, size: int) -> None:
    plan = planned(memory, max_memory=WHOLE)
    assert (plan.batch_size, plan.devices["cpu"].weights) == (size, 400 * MB)
    room = parse_size(memory) * (1 - LEAST_MARGIN) - LIBRARY_BYTES
    larger = min(one for one in batch_sizes(500) if one > size)
    assert predicted_bytes(plan) <= room or size == 1, "the margin goes before a run is refused"
    assert predicted_bytes(plan) + (larger - size) * A_SEQUENCE > room


def test_no_batch_takes_the_place_of_weights_that_a_budget_has() -> None:
    plans = [planned(memory, max_memory={"cpu": "250MB"}) for memory in ("1150MB", "2GiB", "8GiB")]
    assert [plan.batch_size for plan in plans] == [32, 128, 256]
    assert plans[0].homes == plans[1].homes == plans[2].homes


def test_where_budgets_are_worked_out_weights_give_way_only_where_that_is_sooner() -> None:
    machine = {"devices": [{"memory": "4.5GB"}], "host": {"memory": "64GiB"}}
    slow, fast = (planned("", model(40), rates=Rates(host_to_device=rate), hardware=machine) for rate in (MB, 10**13))
    assert (slow.batch_size, slow.devices[0].weights) == (16, 4000 * MB), "passes over what is there cost less"
    assert (fast.batch_size or 0) >= 96
    assert fast.devices[0].weights < 4000 * MB
    assert max(sum(plan.predicted[0].values()) for plan in (slow, fast)) <= 4500 * MB * 0.95


def test_a_batch_that_leaves_no_weights_on_the_accelerator_does_not_move_the_work_to_a_host_without_room() -> None:
    machine = {"devices": [{"memory": "2GB"}], "host": {"memory": "5.5GB"}}
    plan = planned("", model(40), rates=Rates(host_to_device=MB), hardware=machine)
    assert plan.main_device == 0
    assert plan.batch_size in batch_sizes(500)
    assert sum(plan.predicted[0].values()) <= 2000 * MB * 0.95
    host = {part: count for part, count in plan.predicted["cpu"].items() if part != "simulated"}
    assert sum(host.values()) <= coarse(parse_size("5.5GB"))


def test_the_same_inputs_come_to_the_same_size_and_copies_count() -> None:
    one = planned("2GiB", max_memory=WHOLE)
    assert one == planned("2GiB", max_memory=WHOLE)
    assert planned("2GiB", max_memory=WHOLE, generate={"num_beams": 4}).batch_size == 32
    assert planned("2GiB", max_memory=WHOLE, generate={"exact": True}).batch_size == 1
    assert planned("2GiB", max_memory=WHOLE, generate={"prompts": [[1]] * 5}).batch_size == 5


def test_a_size_that_is_given_is_no_choice_and_what_fits_with_none_is_refused() -> None:
    assert planned("2GiB", generate={"batch_size": 8}).batch_size is None
    with pytest.raises(BudgetError, match="which has"):
        planned("500MB", max_memory=WHOLE)
