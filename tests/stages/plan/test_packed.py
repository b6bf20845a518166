"""Plans of tensors that rest packed: their bytes at rest count where they lie and move, those in use where they act."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from offstage.pipeline.errors import BudgetError
from offstage.stages.machine.hardware import Hardware
from offstage.stages.machine.host_memory import Host
from offstage.stages.machine.rates import Rates
from offstage.stages.plan.budgets import allow
from offstage.stages.plan.checks import require_fit
from offstage.stages.plan.layout import lay_out
from offstage.stages.plan.memory_needs import MemoryNeeds
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.placement import Placement
from offstage.stages.plan.plan import Plan
from offstage.stages.plan.policies import POLICIES
from offstage.stages.plan.table import packed_bytes, packed_told
from offstage.stages.plan.token_time import PassTraffic, slowest, token_seconds
from offstage.stages.plan.traffic import PLAIN_STEP, lower_bound_seconds, traffic
from offstage.stages.units import CPU, DeviceId
from tests.stages.plan.mixtures import mixture
from tests.stages.plan.plans import make_plan, predicted
from tests.stages.plan.skeletons import at_rest, stack
from tests.stages.plan.test_properties import cases

RATES = Rates(storage=10, host=1000, host_to_device=100, device=1000, dequantising=50, calls=10**9, loops=10**9)


def halved(model: Outline, **working: int) -> Outline:
    return at_rest(model, {name: size // 2 for name, size in model.sizes.items()}, **working)


def planned(model: Outline, *, io: str = "direct", rates: Rates = RATES, **max_memory: str) -> Plan:
    hardware = {"devices": [{"memory": "1GB"}] * 2}
    budgets = {key.lstrip("_"): size for key, size in max_memory.items()}
    config = {"max_memory": budgets, "device_map": "sequential", "device_map_overrides": {}, "hardware": hardware}
    return predicted(model, make_plan(model, {**config, "generate": {}, "storage": {"io": io}}), MemoryNeeds(0), rates)


def test_a_token_takes_storage_the_bytes_at_rest_and_the_host_those_in_use_and_the_unpacking() -> None:
    model = halved(stack(4))
    plan = planned(model, cpu="30")
    away = [name for name, serving in plan.serving.items() if serving == "direct"]
    assert len(away) == 2
    assert (plan.devices["cpu"].weights, plan.devices["disk"].weights) == (20, 10)
    assert plan.forecast["streamed_bytes_per_token"] == plan.forecast["quantised_bytes_per_token"] == 10
    assert plan.forecast["dequantised_bytes_per_token"] == 20
    assert (plan.forecast["bottleneck"], plan.forecast["seconds_per_token"]) == (
        "storage",
        pytest.approx(1.0 + 20 / 1000 + 0.25 * (40 / 1000 + 20 / 50)),  # a part computes, and there is no other room
    )
    fast = planned(
        model, cpu="30", rates=Rates(storage=1000, host=1000, dequantising=50, calls=10**9, loops=10**9)
    ).forecast
    assert (fast["bottleneck"], fast["seconds_per_token"]) == (
        "dequantising",
        pytest.approx(40 / 1000 + 20 / 50 + 0.25 * (10 / 1000 + 40 / 1000)),
    )
    assert fast["forwards_for_free"] == 0, "the cores have no time left beside"


def test_an_accelerator_gets_over_the_link_what_the_host_unpacks_meanwhile() -> None:
    at_rest = Counter({"disk": 10.0, "cpu": 20.0})
    brought = PassTraffic(2, resident={0: 100}, at_rest=at_rest, packed=10, unpacked=40, used=Counter({0: 60.0}))
    seconds = token_seconds(brought, RATES)
    assert seconds == {
        "storage": 10 / 10 / 2,
        "storage without room": 0,
        "host-to-device": 60 / 100 / 2,
        "host memory": 0,
        "host cores": 0,
        "device memory": (100 + 60) / 1000,
        "device cores": 0,
        "kernel launches": 0,
        "crossing": 0,
        "host-to-device beside the host": 0,
        "dequantising": 40 / 50 / 2,
        "bringing": 0,
        "storage for experts": 0,
        "dequantising experts": 0,
        "memory never used": 0,
    }
    assert slowest(seconds) == ("storage", 0.5)
    assert slowest({**seconds, "storage": 0.1})[0] == "dequantising"


def test_the_bound_of_what_was_measured_unpacks_in_the_proportion_that_was_expected() -> None:
    plan = planned(
        halved(stack(4)), cpu="30", rates=Rates(storage=1000, host=1000, dequantising=50, calls=10**9, loops=10**9)
    )
    assert lower_bound_seconds(plan, streamed_bytes=10, storage_bytes=10) == pytest.approx(40 / 1000 + 20 / 50)
    assert lower_bound_seconds(plan, streamed_bytes=5, storage_bytes=5) == pytest.approx(30 / 1000 + 10 / 50)


def test_the_disk_needs_room_for_the_bytes_at_rest_alone() -> None:
    assert planned(halved(stack(4)), cpu="30", disk="10").budgets["disk"] == 10
    with pytest.raises(BudgetError, match="can't hold"):
        planned(halved(stack(4)), cpu="30", disk="9")


def test_the_host_has_room_for_the_threads_that_unpack() -> None:
    assert planned(halved(stack(4), working=7), cpu="30").predicted["cpu"]["dequantising"] == 7
    assert planned(halved(stack(4), working=7), _0="30").predicted["cpu"]["dequantising"] == 7
    assert "dequantising" not in planned(halved(stack(4), working=7), cpu="100").predicted["cpu"]
    assert "dequantising" not in planned(stack(4), cpu="30").predicted["cpu"]


def test_what_rests_packed_is_read_whole_where_others_are_mapped_or_looked_up() -> None:
    model = at_rest(stack(4), {"layers.3.weight": 4})
    homes: dict[str, DeviceId] = dict.fromkeys(model.sizes, "disk")
    execution: dict[str, DeviceId] = dict.fromkeys(model.direct, "cpu")
    mapped = {f"layers.{index}.weight": "map" for index in range(3)}
    assert lay_out(model, Placement(homes, CPU), execution=execution, io="mmap").serving == {
        **mapped,
        "layers.3.weight": "direct",
    }
    plain = traffic(lay_out(model, Placement(homes, "cpu")), PLAIN_STEP)
    assert (plain.bytes, plain.packed, plain.unpacked) == (34, 4, 10)


def test_experts_that_are_brought_count_as_they_rest() -> None:
    plain = mixture("Mixtral")
    packed = at_rest(plain, {name: plain.sizes[name] // 4 for name in plain.expert_tensors})
    size = {"cpu": f"{plain.dense.skeleton.bytes + 4 * max(kind.bytes for kind in plain.expert_kinds.values())}"}
    was, now = (planned(model, **size).forecast for model in (plain, packed))
    assert int(now["expert_bytes_per_token"]) == pytest.approx(int(was["expert_bytes_per_token"]) / 4, rel=0.01)
    assert now["expert_hit_rate"] == was["expert_hit_rate"]
    assert now["dequantised_bytes_per_token"] == pytest.approx(int(was["expert_bytes_per_token"]), rel=0.01)


def optimal_plan(model: Outline, *, rates: Rates, **max_memory: str) -> Plan:
    hardware = {"devices": [{"memory": "1GB"}]}
    budgets = {key.lstrip("_"): size for key, size in max_memory.items()}
    config = {"max_memory": budgets, "device_map": "optimal", "device_map_overrides": {}, "hardware": hardware}
    return make_plan(model, {**config, "generate": {}, "storage": {"io": "direct"}}, rates=rates)


def test_the_host_holds_packed_what_storage_would_be_slower_to_bring() -> None:
    model = halved(stack(20))
    slow = optimal_plan(model, rates=Rates(storage=10, host=10**6, dequantising=10**4), cpu="120")
    packed = [name for name, serving in slow.serving.items() if serving == "packed"]
    assert len(packed) == 20, "all of it, beside a part that is used and one that comes"
    assert slow.devices["cpu"].weights == 100
    assert (slow.forecast["streamed_bytes_per_token"], slow.forecast["bottleneck"]) == (100, "dequantising")
    assert packed_bytes(slow) == {"half": {"used": 200, "cpu": 100}}
    assert slow.homes[packed[0]] == "cpu"
    fast = optimal_plan(model, rates=Rates(storage=10**6, host=10**6, dequantising=100), cpu="120")
    assert "packed" not in fast.serving.values(), "the cores that unpack are what is slow"


def test_the_budget_is_shared_between_what_lies_as_it_is_used_and_packed() -> None:
    model = halved(stack(20))
    plan = optimal_plan(model, rates=Rates(storage=10, host=10**6, dequantising=10**4), cpu="170")
    lying = Counter(plan.serving.get(name, "resident") for name in model.sizes)
    assert lying["direct"] == 0
    assert lying["resident"] >= 8
    assert lying["packed"] >= 8
    assert plan.devices["cpu"].weights == 10 * lying["resident"] + 5 * lying["packed"]


@pytest.mark.parametrize(("budget", "parts"), [("80", 4), ("120", 2)])
def test_what_is_read_and_unpacked_has_room_for_four_parts_and_what_waits_in_memory_for_two(
    budget: str, parts: int
) -> None:
    """One computes while others are read, and unpacked: only what comes from storage waits for that."""
    plan = optimal_plan(halved(stack(20)), rates=Rates(storage=10, host=10**6, dequantising=10**4), cpu=budget)
    assert ("disk" in plan.homes.values()) == (parts == 4)
    assert int(budget) - plan.devices["cpu"].weights == 10 * parts


def test_slots_leave_room_for_four_parts_that_are_read_and_unpacked() -> None:
    plain = mixture("Mixtral")
    dense = {name: size for name, size in plain.sizes.items() if name in plain.dense.sizes and size > 1000}
    parts = sorted((size for name, size in dense.items() if name not in plain.lookups), reverse=True)
    budget = 2 * sum(parts)
    for model, count in ((at_rest(plain, {name: size // 2 for name, size in dense.items()}), 4), (plain, 2)):
        layout = lay_out(model, Placement(dict.fromkeys(model.sizes, "disk"), "cpu"), {"cpu": budget, "disk": None})
        pool, left = layout.pools["cpu"], budget - sum(parts[:count])
        assert layout.rooms["cpu"].expert_cache == left // pool.unit_bytes * pool.unit_bytes < pool.bytes


def test_an_accelerator_has_waiting_on_the_host_packed_what_would_be_on_disk() -> None:
    model = halved(stack(20))
    plan = optimal_plan(model, rates=Rates(storage=10, host_to_device=10**6, dequantising=10**6), _0="40", cpu="50")
    waiting = [name for name, serving in plan.serving.items() if serving == "packed"]
    assert len(waiting) == 10
    assert all(plan.homes[name] == "cpu" and plan.execution[name.rpartition(".")[0]] == 0 for name in waiting)
    assert plan.forecast["dequantised_bytes_per_token"] == 10 * (len(waiting) + list(plan.homes.values()).count("disk"))


@pytest.mark.parametrize("accelerated", [False, True])
def test_experts_wait_on_the_host_packed_where_storage_would_be_slower(accelerated: bool) -> None:
    plain = mixture("Mixtral")
    model = at_rest(plain, {name: plain.sizes[name] // 4 for name in plain.expert_tensors})
    one = max(kind.bytes for kind in plain.expert_kinds.values())
    quarter = sum(plain.sizes[name] for name in plain.expert_tensors) // 4
    beside = plain.dense.skeleton.bytes + 3 * one
    budgets = {"_0": str(2 * beside), "cpu": str(quarter)} if accelerated else {"cpu": str(beside + quarter)}
    slow = Rates(storage=10, host=10**9, host_to_device=10**9, device=10**9, dequantising=10**6)
    plan = optimal_plan(model, rates=slow, **budgets)
    assert set(plan.loading.packed_on_host) == plain.expert_tensors
    assert {plan.serving[name] for name in plain.expert_tensors} == {"experts"}
    assert packed_bytes(plan)["half"]["cpu"] == quarter
    assert plan.devices["cpu"].weights + plan.devices["cpu"].expert_cache <= (plan.budgets["cpu"] or 0)
    assert "storage_bandwidth_bytes_per_second" not in plan.forecast, "nothing of it is read for a token"
    swift = Rates(storage=10**9, host=10**9, host_to_device=10**9, device=10**9, dequantising=10**9)
    again = optimal_plan(plain, rates=swift, **budgets)
    assert not again.loading.packed_on_host


def test_what_is_not_packed_stays_before_what_is_read_in_fewer_bytes() -> None:
    model = at_rest(stack(20), {f"layers.{index}.weight": 5 for index in range(10)})
    plan = optimal_plan(model, rates=Rates(storage=10, host=10**6, dequantising=50), cpu="150")
    assert {name for name, home in plan.homes.items() if home == "disk"} <= model.packed.keys()


def test_the_screen_says_what_rests_packed_where_and_by_which_codec() -> None:
    plan = optimal_plan(halved(stack(20)), rates=Rates(storage=10, host=10**6, dequantising=10**4), cpu="80")
    assert packed_bytes(plan) == {"half": {"used": 200, "cpu": 40, "disk": 60}}
    assert packed_told(plan) == ["half: 40 B on cpu and 60 B on disk at rest, 200 B in use"]
    assert packed_told(optimal_plan(stack(20), rates=RATES, cpu="60")) == []


def test_an_automatic_budget_leaves_what_unpacking_takes() -> None:
    machine = Hardware((), Host(10**10, 10**10))
    terms = allow({}, machine, unpacking=12345).terms["cpu"]
    assert terms["dequantising"] == -12345
    assert "dequantising" not in allow({}, machine).terms["cpu"]


@st.composite
def packed_cases(draw: st.DrawFn) -> tuple[Outline, dict[DeviceId, int | None]]:
    _, outline, budgets = draw(cases())
    persistent = {outline.skeleton.leader(spec.name) for spec in outline.skeleton.tensors if spec.persistent}
    chosen = draw(st.sets(st.sampled_from(sorted(persistent)))) if persistent else set()
    leaders = {name: draw(st.integers(0, outline.sizes[name])) for name in sorted(chosen)}
    sizes = {
        name: leaders[outline.skeleton.leader(name)]
        for name in outline.sizes
        if outline.skeleton.leader(name) in leaders
    }
    whole = sum(outline.sizes.values())
    return at_rest(outline, sizes), {**budgets, "disk": draw(st.none() | st.integers(0, whole))}


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=packed_cases())
def test_no_budget_is_exceeded_by_what_rests_packed(policy: str, case: Any) -> None:
    outline, budgets = case
    placement = POLICIES[policy](outline, budgets)
    try:
        require_fit(lay_out(outline, placement, budgets))
    except BudgetError:
        return
    layout = lay_out(outline, placement, budgets)
    made = {name: "cpu" for name, home in placement.homes.items() if home == "disk" and name in outline.computed}
    with_made = _lying(outline, replace(placement, homes={**placement.homes, **made}))
    assert with_made == {device: count for device, count in layout.weights.items() if count}
    loaded = {name: home for name, home in placement.homes.items() if name not in made}
    resident, kept = _lying(outline, replace(placement, homes=loaded)), layout.reserves
    for device in {*resident, *kept}:
        budget = budgets[device]
        assert budget is None or resident.get(device, 0) + kept.get(device, 0) <= budget


def _lying(outline: Outline, placement: Placement) -> Mapping[DeviceId, int]:
    """Return the bytes on each device, counted tensor by tensor."""
    by_device: Counter[DeviceId] = Counter()
    for name, device in placement.homes.items():
        packed = outline.packed.get(name)
        rests = packed is not None and (device == "disk" or name in placement.packed)
        by_device[device] += packed.bytes if packed is not None and rests else outline.sizes[name]
    return +by_device
