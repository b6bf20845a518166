"""Layers that compute on the host because they lie there (``execution: fastest``): when, how many, and what is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from offstage.stages.machine.rates import Rates
from offstage.stages.plan.layout import lay_out
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.placement import execution_devices
from offstage.stages.plan.plan import Plan
from offstage.stages.plan.policies import host_layers
from offstage.stages.plan.policies.explicit import override
from offstage.stages.plan.policies.host_layers import with_host_layers
from offstage.stages.plan.policies.optimal import Search
from offstage.stages.plan.stage import PlanStage
from offstage.stages.plan.table import render
from offstage.stages.plan.token_time import PassTraffic, waiting_seconds
from offstage.stages.plan.traffic import Step, forecast
from offstage.stages.units import CPU, DISK, DeviceId
from tests.stages.plan.mixtures import mixture
from tests.stages.plan.plans import make_plan
from tests.stages.plan.skeletons import at_rest, outline, stack
from tests.stages.plan.test_optimal import llama

GB = 10**9
BUDGETS: dict[DeviceId, int | None] = {0: 800 * 10**6, CPU: 3 * GB, DISK: None}
RATES = Rates(storage=GB, host=50 * GB, host_to_device=25 * GB, device=800 * GB)


def config(*, execution: str = "fastest", accelerators: int = 1, **changes: Any) -> dict[str, Any]:
    rates = {"storage": "1GB", "host": "50GB", "host_to_device": "25GB", "device": "800GB"}
    hardware = {"devices": [{"memory": "2GB"}] * accelerators, "host": {"memory": "16GB"}, "rates": rates}
    budgets = {str(device): "800MB" for device in range(accelerators)} | {"cpu": "3GB"}
    base = {"max_memory": budgets, "device_map": "optimal", "hardware": hardware, "execution": execution}
    return {**base, "generate": {}, "storage": {"io": "direct"}, **changes}


def with_rates(**rates: str) -> dict[str, Any]:
    given = config()
    return {**given, "hardware": {**given["hardware"], "rates": {**given["hardware"]["rates"], **rates}}}


def test_where_the_link_is_faster_weights_stream_and_the_plan_is_that_of_exact() -> None:
    slow = {"host": "1GB"}
    fastest, exact = (make_plan(llama(), {**with_rates(**slow), "execution": how}) for how in ("fastest", "exact"))
    assert fastest == exact
    assert fastest.host_layers == ()
    assert "copy" in fastest.serving.values()


def test_where_the_host_is_much_faster_all_that_waits_there_computes_there() -> None:
    plan = make_plan(llama(), with_rates(host_to_device="100MB", host="200GB"))
    assert CPU in plan.execution.values()
    assert plan.serving == {}, "nothing is brought"
    assert plan.forecast["streamed_bytes_per_token"] == 0


def test_in_between_some_layers_compute_on_the_host_while_the_link_brings_others() -> None:
    plan = make_plan(llama(), config())
    assert 0 < len(plan.host_layers) < 22
    assert "copy" in plan.serving.values()
    read, streamed = (float(plan.forecast[f"{kind}_bytes_per_token"]) for kind in ("host_read", "streamed"))
    computing = read / (50 * GB) + (llama().skeleton.bytes - read) / (800 * GB)
    seconds = float(plan.forecast["seconds_per_token"])
    assert max(streamed / (25 * GB), computing) <= seconds < 0.8 * (streamed / (25 * GB) + computing), "side by side"
    assert seconds < 0.75 * float(make_plan(llama(), config(execution="exact")).forecast["seconds_per_token"])


@pytest.mark.parametrize("link", [2 * GB, 25 * GB])
def test_the_number_is_that_of_trying_them_all(link: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, counts = llama(10), []
    budgets: dict[DeviceId, int | None] = {0: 300 * 10**6, CPU: 2 * GB, DISK: None}
    for host in (link // 50, link // 2, 2 * link, 50 * link):
        rates = replace(RATES, host_to_device=link, host=host)
        placement = with_host_layers(model, budgets, rates)
        with monkeypatch.context() as patched:
            patched.setattr(host_layers, "_FEW", 10**6)
            patched.setattr(host_layers, "ALIKE", 1.0)
            best = with_host_layers(model, budgets, rates)
        seconds, least = (forecast(lay_out(model, one, budgets), Step(), rates).seconds for one in (placement, best))
        assert seconds <= host_layers.ALIKE * least
        counts.append(len(placement.computes))
    assert counts[0] == 0 < counts[1]
    assert counts == sorted(counts), "a faster host never has fewer"


def test_what_storage_bounds_stays_as_it_is() -> None:
    model = stack(30, 10**7)
    budgets: dict[DeviceId, int | None] = {0: 10**8, CPU: 10**8, DISK: None}
    rates = replace(RATES, storage=10**8)
    assert with_host_layers(model, budgets, rates) == Search(rates).optimal(model, budgets)
    assert with_host_layers(model, {**budgets, CPU: 3 * 10**8}, rates).computes, "without it some would compute there"


def test_activations_that_are_slow_to_cross_keep_layers_together_on_the_accelerator() -> None:
    model = llama()
    light, heavy = (with_host_layers(model, BUDGETS, RATES, step=Step(output_bytes=count)) for count in (4096, 10**9))
    assert len(light.computes) > len(heavy.computes) == 0


def test_where_many_share_what_is_brought_less_computes_on_the_host() -> None:
    alone, together = (
        len(with_host_layers(llama(), BUDGETS, RATES, step=Step(members=count)).computes) for count in (1, 8)
    )
    assert alone > together


@pytest.mark.parametrize(("host_seconds", "waits"), [(0.5, 2.5), (1.0, 2.0), (2.0, 1.0), (9.0, 1.0)])
def test_while_the_host_computes_a_link_runs_ahead_as_far_as_its_reserve_has_room(
    host_seconds: float, waits: float
) -> None:
    brought = PassTraffic(runs=[(CPU, 1.0), (0, 30.0)], reserves={0: 20})
    assert waiting_seconds(brought, Rates(host_to_device=10), host_seconds) == waits


def test_a_host_that_is_slower_than_the_link_is_only_waited_for() -> None:
    for host in (GB // 2, 2 * GB):
        assert with_host_layers(llama(), BUDGETS, replace(RATES, host_to_device=25 * GB, host=host)).computes == {}


def test_a_pass_of_many_tokens_computes_less_on_the_host_than_it_reads() -> None:
    one, sixteen, many = (
        len(with_host_layers(llama(), BUDGETS, RATES, step=Step(tokens=count)).computes) for count in (1, 16, 2048)
    )
    assert one == sixteen > many == 0
    text = make_plan(llama(), config(stages=["score"], score={"texts": ["word " * 2000]}))
    assert text.host_layers == (), "a window's tokens compute at once"


def test_the_hosts_layers_are_from_all_over_the_order_of_execution() -> None:
    placement = with_host_layers(llama(), BUDGETS, RATES)
    computing = list(execution_devices(llama(), placement).values())
    halves = computing[: len(computing) // 2], computing[len(computing) // 2 :]
    assert abs(halves[0].count(CPU) - halves[1].count(CPU)) <= 2
    runs = "".join("h" if device == CPU else "a" for device in computing)
    assert "hhhh" not in runs


def test_a_table_is_looked_up_on_the_host_and_costs_no_reading_there() -> None:
    skeleton = llama().skeleton
    table = replace(skeleton.modules[1], looks_up=True)
    model = Outline(replace(skeleton, modules=(skeleton.modules[0], table, *skeleton.modules[2:])))
    plan = make_plan(model, with_rates(host="26GB"))
    assert plan.execution["embed"] == CPU
    layers = [name for name in plan.host_layers if name != "embed"]
    read = sum(model.sizes[name] for layer in layers for name in model.below(layer))
    assert plan.forecast["host_read_bytes_per_token"] == read


def test_tied_layers_compute_on_one_side_together() -> None:
    names = [f"layers.{index}" for index in range(8)]
    sizes = {"embed.weight": 5 * 10**7, **{f"{name}.w": 10**8 for name in names}, "head.weight": 5 * 10**7}
    tied = [["embed.weight", "head.weight"]]
    model = outline(sizes, classes=dict.fromkeys(names, "L"), no_split=["L"], tied=tied)
    for room in (10**8, 2 * 10**8, 4 * 10**8):
        placement = with_host_layers(model, {0: room, CPU: GB, DISK: None}, replace(RATES, host=30 * GB))
        computing = execution_devices(model, placement)
        assert (computing["embed"] == CPU) == (computing["head"] == CPU)
        assert (placement.homes["embed.weight"] == CPU) >= (computing["head"] == CPU)


def test_what_rests_packed_does_not_compute_on_the_host() -> None:
    plain = llama()
    packed = {name: size // 2 for name, size in plain.sizes.items() if name.startswith("layers.")}
    model = at_rest(plain, packed)
    budgets: dict[DeviceId, int | None] = {0: 800 * 10**6, CPU: GB, DISK: None}
    placement = with_host_layers(model, budgets, replace(RATES, host_to_device=GB))
    assert not any(layer.startswith("layers.") for layer in placement.computes)


def test_of_a_mixtures_layer_the_host_reads_the_experts_that_a_token_uses() -> None:
    model = mixture("Qwen3-MoE")
    given = {**with_rates(host_to_device="1MB"), "max_memory": {"0": str(model.skeleton.bytes // 3), "cpu": "1GB"}}
    plan = make_plan(model, given)
    assert plan.host_layers
    names = [name for layer in model.layers if layer.name in plan.host_layers for name in layer.tensors]
    whole = sum(model.sizes[name] for name in names)
    assert 0 < plan.forecast["host_read_bytes_per_token"] < whole
    assert {plan.execution[module] for module in model.experts} == {0, CPU} or plan.serving == {}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device_map": "balanced"}, "device_map is 'balanced'; take optimal, or execution=exact"),
        ({"device_map": {"": "cpu"}}, "device_map is a map; take optimal"),
        ({"stages": ["finetune"]}, "says nothing of a step of training; take execution=exact"),
    ],
)
def test_it_is_refused_where_nothing_is_chosen_by_a_tokens_time(changes: dict[str, Any], words: str) -> None:
    (fault,) = PlanStage().check(config(**changes))
    assert fault.key == "execution"
    assert words in fault.message
    assert not list(PlanStage().check(config(**changes, execution="exact")))


def test_without_an_accelerator_it_is_the_same_and_said_so() -> None:
    fastest, exact = (make_plan(llama(), config(accelerators=0, execution=how)) for how in ("fastest", "exact"))
    assert {*fastest.notes} - {*exact.notes} == {"execution=fastest changes nothing: no accelerator computes"}
    assert replace(fastest, notes=()) == replace(exact, notes=())


def test_the_plan_says_what_computes_on_the_host_and_that_bits_may_differ() -> None:
    model = llama()
    plan = make_plan(model, config())
    count = len(plan.host_layers)
    assert f"{count} of 25 layers compute on the host, where they lie: " in render(plan)
    assert "the last bits may differ from those of other placements" in render(plan)
    layer = plan.host_layers[0]
    assert plan.reasons[layer].endswith("resident on cpu, which computes it: faster than to copy it to an accelerator")


def test_keys_and_values_of_the_hosts_layers_are_predicted_there() -> None:
    plan = make_plan(llama(), {**config(), "model": {}})
    assert plan.predicted[CPU]["weights"] == plan.devices[CPU].weights
    assert plan.predicted[CPU]["activations"] == plan.predicted[0]["activations"]


def test_an_override_that_draws_a_layer_to_an_accelerator_has_it_compute_there() -> None:
    model = llama()
    placement = with_host_layers(model, BUDGETS, RATES)
    drawn, *others = (layer for layer in placement.computes if layer.startswith("layers."))
    overridden = override(model, placement, {drawn: 0})
    assert execution_devices(model, overridden)[drawn] == 0
    assert {execution_devices(model, overridden)[layer] for layer in others} == {CPU}


SIZES = st.lists(st.integers(1, 40).map(lambda count: count * 10**6), min_size=2, max_size=12)


@settings(max_examples=30, deadline=None)
@given(sizes=SIZES, room=st.integers(5, 100), host=st.integers(1, 100), link=st.integers(1, 100))
def test_a_plan_fits_its_budgets_and_is_never_slower_than_that_of_exact(
    sizes: list[int], room: int, host: int, link: int
) -> None:
    names = [f"layers.{index}" for index in range(len(sizes))]
    tensors = {f"{name}.{part}": size for name, size in zip(names, sizes, strict=True) for part in ("a.w", "b.w")}
    model = outline(tensors, classes=dict.fromkeys(names, "L"), no_split=["L"])
    budgets: dict[DeviceId, int | None] = {0: room * 10**6, CPU: sum(sizes), DISK: None}
    rates = Rates(host=host * 10**8, host_to_device=link * 10**8, device=100 * GB)
    exact, fastest = (
        Search(rates).optimal(model, budgets),
        with_host_layers(model, budgets, rates, step=Step(output_bytes=1000)),
    )
    if lay_out(model, exact, budgets).shortage(tight=True) is None:
        assert lay_out(model, fastest, budgets).shortage(tight=True) is None
        before, after = (
            forecast(lay_out(model, one, budgets), Step(output_bytes=1000), rates).seconds for one in (exact, fastest)
        )
        assert after <= before
    assert all(fastest.homes[name] == CPU for layer in fastest.computes for name in model.below(layer))


def test_the_plan_predicts_what_the_policy_went_by() -> None:
    plan: Plan = make_plan(llama(), config())
    placement = with_host_layers(llama(), BUDGETS, RATES)
    assert set(placement.computes) == set(plan.host_layers)
    assert plan.forecast["seconds_per_token"] == pytest.approx(
        forecast(lay_out(llama(), placement, BUDGETS), Step(), RATES).seconds
    )
