"""Accelerators that unpack what comes to them packed: the plan gives them room for it, and knows what it is worth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from offstage.stages.empty_init.skeleton import DeviceUnpacking
from offstage.stages.machine.rates import Rates
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.plan import Plan
from offstage.stages.plan.table import packed_told
from offstage.stages.plan.token_time import PassTraffic, token_seconds
from offstage.stages.plan.traffic import lower_bound_seconds
from tests.stages.plan.mixtures import mixture
from tests.stages.plan.plans import make_plan, of
from tests.stages.plan.skeletons import at_rest, stack

ON_DEVICE = DeviceUnpacking(landing_bytes=1, scratch_bytes=2, table_bytes=1, moved_bytes=50)
"""Of tensors of 10 bytes that rest in 5."""

RATES = Rates(storage=10**6, host=10**6, host_to_device=100, device=10**4, dequantising=50)


def halved(model: Outline, device: DeviceUnpacking | None = ON_DEVICE) -> Outline:
    return at_rest(model, {name: size // 2 for name, size in model.sizes.items()}, device=device, working=7)


def planned(
    model: Outline,
    *,
    policy: Any = "optimal",
    rates: Rates = RATES,
    overrides: Any = None,
    generate: Any = None,
    **max_memory: str,
) -> Plan:
    budgets = {key.lstrip("_"): size for key, size in max_memory.items()}
    config = {
        "max_memory": budgets,
        "device_map": policy,
        "device_map_overrides": overrides or {},
        "generate": generate or {},
    }
    hardware = {"devices": [{"memory": "1GB"}] * 2}
    return make_plan(model, {**config, "hardware": hardware, "storage": {"io": "direct"}}, rates=rates)


def test_an_entry_that_is_overridden_leaves_the_unpacking_where_it_was() -> None:
    model = halved(stack(20))
    plan = planned(model, overrides={"layers.7": "disk"}, _0="60")
    assert plan.homes["layers.7.weight"] == "disk"
    assert of(plan, "dequantising") == {0: 4}
    assert "dequantising" not in plan.predicted["cpu"]


def test_each_number_of_prompts_in_lockstep_has_a_plan_of_its_own() -> None:
    """What unpacking on the accelerator is worth hangs on how many prompts share what it brings."""
    model, rates = halved(stack(20)), replace(RATES, device=1100)
    ask = {"prompts": [[1]] * 64, "max_new_tokens": 4, "exact": True}
    sizes = (1, 2, 4, 8, 16, 32, 64, "auto")
    chosen = {size: planned(model, rates=rates, generate={**ask, "lockstep": size}, _0="60") for size in sizes}
    assert {bool(of(plan, "dequantising")) for size, plan in chosen.items() if size != "auto"} == {True, False}
    auto = chosen.pop("auto")
    assert auto.lockstep is not None
    assert replace(auto, lockstep=None) == chosen[auto.lockstep]


POLICIES = ["optimal", "sequential", "balanced", {"": "disk", "layers.0": 0}]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_the_link_brings_packed_bytes_and_the_device_moves_what_unpacking_takes(policy: Any) -> None:
    plan = planned(halved(stack(20)), policy=policy, _0="60")
    assert of(plan, "dequantising") == {0: 4}
    assert plan.predicted[0]["dequantising"] == 4
    assert "dequantising" not in plan.predicted["cpu"], "the host has nothing to unpack"
    away = [name for name, serving in plan.serving.items() if serving in ("direct", "packed")]
    assert of(plan, "transfer_bytes") == {0: 5 * len(away)}
    forecast = plan.forecast
    assert forecast["device_dequantised_bytes_per_token"] == forecast["dequantised_bytes_per_token"] == 10 * len(away)
    assert forecast["device_moved_bytes_per_token"] == 50 * len(away)
    assert forecast["seconds_per_token"] == pytest.approx(max(5 * len(away) / 100, (200 + 50 * len(away)) / 10**4))
    assert forecast["seconds_per_token"] == pytest.approx(
        lower_bound_seconds(plan, streamed_bytes=5 * len(away), storage_bytes=5 * len(away))
    )
    assert plan.devices[0].weights + plan.devices[0].reserve + plan.devices[0].dequantising <= 60
    assert packed_told(plan)[-1] == "accelerators dequantise what streams to them, in 4 B on 0"


REFUSALS = {
    "only the host can": (None, RATES),
    "its memory is slower than the link and the host": (
        ON_DEVICE,
        replace(RATES, device=100, host_to_device=1000, dequantising=10**4),
    ),
    "it takes half of the budget": (replace(ON_DEVICE, scratch_bytes=29), RATES),
}


@pytest.mark.parametrize(("device", "rates"), REFUSALS.values(), ids=REFUSALS)
def test_the_host_unpacks_where_that_is_better_and_the_plan_is_what_it_was(
    device: DeviceUnpacking | None, rates: Rates
) -> None:
    plan = planned(halved(stack(20), device), rates=rates, _0="60")
    assert plan == planned(halved(stack(20), None), rates=rates, _0="60")
    assert of(plan, "dequantising") == {}
    assert plan.predicted["cpu"]["dequantising"] > 0


def test_each_of_several_accelerators_has_its_own_room() -> None:
    plan = planned(halved(stack(20)), _0="60", _1="60")
    streaming = {device for device, count in of(plan, "transfer_bytes").items() if count}
    assert of(plan, "dequantising") == dict.fromkeys(sorted(streaming), 4)
    used = int(plan.forecast["dequantised_bytes_per_token"])
    assert sum(of(plan, "transfer_bytes").values()) == used // 2


def test_what_waits_packed_in_memory_needs_no_buffers_there() -> None:
    plan = planned(halved(stack(20)), rates=replace(RATES, storage=1), _0="60", cpu="200")
    assert set(plan.serving.values()) == {"packed"}
    assert of(plan, "dequantising") == {0: 4}
    assert plan.predicted["cpu"]["staging"] == 0


def test_experts_are_unpacked_in_their_slots() -> None:
    plain = mixture("Mixtral")
    size = max(kind.bytes for kind in plain.expert_kinds.values())
    device = DeviceUnpacking(landing_bytes=10, scratch_bytes=20, table_bytes=10, moved_bytes=size)
    sizes = {name: plain.sizes[name] // 4 for name in plain.expert_tensors}
    budget = {"_0": str(plain.dense.skeleton.bytes + 5 * size), "cpu": "1000MB"}
    swift = Rates(storage=10**9, host=10**9, host_to_device=10**6, device=10**12, dequantising=10**6)
    host = planned(at_rest(plain, sizes), rates=swift, **budget)
    plan = planned(at_rest(plain, sizes, device=device), rates=swift, **budget)
    assert of(plan, "dequantising") == {0: 40}
    assert sum(of(plan, "transfer_bytes").values()) < 0.3 * sum(of(host, "transfer_bytes").values())
    assert plan.devices[0].weights + plan.devices[0].reserve + plan.devices[0].expert_cache + 40 <= int(budget["_0"])
    assert float(plan.forecast["seconds_per_token"]) < float(host.forecast["seconds_per_token"])


def test_accelerators_unpack_side_by_side_and_compute_in_turn() -> None:
    brought = PassTraffic(2, resident={0: 100, 1: 100})
    for device in (0, 1):
        brought.add("cpu", 10, computes=device, unpacked=20, moved=300)
    assert brought.links == {0: 10, 1: 10}
    seconds = token_seconds(brought, RATES)
    assert seconds["device memory"] == (100 + 20 + 300 / 2) / 10**4, "that of one of them, more than all compute with"
    alone = replace(brought, members=1, resident={0: 1000, 1: 1000})
    assert token_seconds(alone, RATES)["device memory"] == 2040 / 10**4
    assert (seconds["host-to-device"], seconds["dequantising"]) == (10 / 100 / 2, 0)
