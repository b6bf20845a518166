"""Plans for mixtures whose experts are modules in a list: they count those that a token is routed to."""

from dataclasses import replace
from functools import cache

import pytest

from offstage.stages.empty_init.describe import describe
from offstage.stages.machine.rates import Rates
from offstage.stages.plan.expert_slots import ROOMY, Routing
from offstage.stages.plan.layout import lay_out
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.placement import Placement
from offstage.stages.plan.policies.optimal import Search
from offstage.stages.plan.policies.whole_layers import sequential
from offstage.stages.plan.traffic import PLAIN_STEP, Step, forecast, traffic
from offstage.stages.units import CPU, DISK, DeviceId
from tests.stages.empty_init.test_expert_lists import described
from tests.stages.listed_experts import EXPERTS, LAYERS, TOP, WIDTH, mixture
from tests.stages.plan.plans import make_plan

EXPERT = 3 * 4 * WIDTH * 2 * WIDTH
"""The bytes of one expert."""


@cache
def outline() -> Outline:
    return Outline(described(mixture()))


def planned(here: Outline, *, tokens: int = 1) -> dict[str, float | int | str]:
    """Return what is forecast for a token where all is on disk."""
    layout = lay_out(here, Placement(dict.fromkeys(here.sizes, DISK), CPU))
    return forecast(layout, Step(Routing(tokens)), Rates()).figures


def dense_bytes(here: Outline) -> int:
    return sum(size for name, size in here.sizes.items() if name not in here.listed and not name.startswith("embed"))


def test_a_token_is_expected_to_bring_the_experts_that_it_is_routed_to() -> None:
    assert planned(outline())["streamed_bytes_per_token"] == dense_bytes(outline()) + LAYERS * TOP * EXPERT


def test_two_tokens_of_a_pass_share_some_of_their_experts() -> None:
    routed = planned(outline(), tokens=2)["streamed_bytes_per_token"] - dense_bytes(outline())
    assert routed == pytest.approx(LAYERS * EXPERT * EXPERTS * (1 - (1 - TOP / EXPERTS) ** 2), rel=1e-6)


@pytest.mark.parametrize(
    ("asked", "tokens", "members"),
    [
        ({"batch_size": None, "lockstep": 1}, 1, 1),
        ({"batch_size": 8}, 8, 1),
        ({"lockstep": 8}, 8, 8),
        ({"batch_size": 2, "lockstep": 3}, 6, 3),
        ({"num_beams": 4, "lockstep": 1}, 4, 1),
    ],
)
def test_the_stage_expects_the_experts_of_all_tokens_of_a_pass(
    asked: dict[str, object], tokens: int, members: int
) -> None:
    generate = {"prompts": [[5]] * 8, "max_new_tokens": 1, **asked}
    machine = {"devices": [], "host": {"memory": "8GiB"}}
    plan = make_plan(
        outline(), {"generate": generate, "device_map": "disk", "max_memory": {"cpu": "1GB"}, "hardware": machine}
    )
    expected = planned(outline(), tokens=tokens)["streamed_bytes_per_token"]
    assert isinstance(expected, float | int)
    assert plan.forecast["streamed_bytes_per_token"] == pytest.approx(expected / members, rel=1e-6)


def test_all_experts_are_expected_where_nothing_says_how_many_a_token_uses() -> None:
    here = Outline(describe(mixture(), rehearsed=False))
    assert planned(here)["streamed_bytes_per_token"] == dense_bytes(here) + LAYERS * EXPERTS * EXPERT


def test_the_reserve_of_a_layer_is_for_two_of_its_experts() -> None:
    skeleton = describe(mixture(), no_split=["Block"], rehearsed=False)
    here = Outline(skeleton)
    kept = lay_out(here, Placement(dict.fromkeys(here.sizes, DISK), CPU)).layer_reserves
    block = sum(size for name, size in here.sizes.items() if name.startswith("layers.0.") and name not in here.listed)
    assert kept == {CPU: block + ROOMY * EXPERT}


def test_the_layers_that_the_fields_functions_see_have_all_their_experts() -> None:
    here = Outline(describe(mixture(), no_split=["Block"], rehearsed=False), gathers=False, routes=False)
    kept = lay_out(here, Placement(dict.fromkeys(here.sizes, DISK), CPU)).layer_reserves
    assert kept[CPU] > EXPERTS * EXPERT


def blocks() -> Outline:
    """Return the outline of a mixture whose layers compute on one device each."""
    skeleton = describe(mixture(), no_split=["Block"], rehearsed=False)
    return Outline(replace(skeleton, expert_lists=dict.fromkeys(skeleton.expert_lists, TOP)))


@pytest.mark.parametrize("main", [CPU, 0])
@pytest.mark.parametrize("experts", [2, 5, 40])
def test_optimal_keeps_what_every_token_needs_before_any_expert(main: DeviceId, experts: int) -> None:
    here = blocks()
    dense = sum(here.sizes[name] for name in here.sizes if name not in here.listed)
    budgets = {main: dense + experts * EXPERT, DISK: None}
    placement = Search().optimal(here, budgets)
    assert lay_out(here, placement, budgets).shortage() is None
    assert all(home == main for name, home in placement.homes.items() if name not in here.listed)
    near = sum(here.sizes[name] for name, home in placement.homes.items() if name in here.listed and home == main)
    assert (experts - ROOMY - 1) * EXPERT < near <= (experts - ROOMY) * EXPERT


def test_optimal_streams_no_more_for_a_token_than_sequential_under_any_budget() -> None:
    here = blocks()
    whole = sum(here.sizes.values())
    for room in range(2 * EXPERT + EXPERT, whole, whole // 9):
        budgets = {CPU: room, DISK: None}
        ways = (Search().optimal, sequential)
        ours, theirs = (traffic(lay_out(here, way(here, budgets)), PLAIN_STEP).bytes for way in ways)
        assert ours <= theirs


def test_optimal_needs_room_for_two_experts_beside_the_largest_dense_part() -> None:
    here = blocks()
    budgets = {CPU: 3 * EXPERT, DISK: None}
    assert lay_out(here, Search().optimal(here, budgets), budgets).shortage() is None
    assert budgets[CPU] < EXPERTS * EXPERT


def test_experts_wait_on_the_host_before_they_wait_on_disk() -> None:
    here = blocks()
    dense = sum(here.sizes[name] for name in here.sizes if name not in here.listed)
    placement = Search().optimal(here, {0: dense + 4 * EXPERT, CPU: 10 * EXPERT, DISK: None})
    by_home = {home: sum(here.sizes[n] for n, at in placement.homes.items() if at == home) for home in (0, CPU, DISK)}
    assert by_home[CPU] == 10 * EXPERT
    assert by_home[0] >= dense + EXPERT
