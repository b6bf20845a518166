"""Plans of mixtures: what every token needs comes first, and what the budgets leave is slots for experts."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from offstage.pipeline.decoding import decode
from offstage.pipeline.errors import BudgetError
from offstage.stages.dispatch import dispatch_plan
from offstage.stages.plan import plan as plans
from offstage.stages.plan.expert_slots import SINGLE, Pool, Routing, roomy_slots
from offstage.stages.plan.layout import lay_out
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.plan import Plan
from offstage.stages.plan.policies import POLICIES
from offstage.stages.plan.table import render
from offstage.stages.plan.traffic import Step, calls, traffic
from offstage.stages.units import CPU, DISK, DeviceId
from tests.long_form import in_part, in_turn
from tests.stages.plan.mixtures import mixture, token_bytes
from tests.stages.plan.plans import make_plan, of
from tests.stages.plan.skeletons import at_rest

NAMES = ["Mixtral", "Qwen3-MoE", "DeepSeek-V3", "gpt-oss"]
many = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def plan_for(outline: Outline, policy: Any = "optimal", **budgets: int) -> Plan:
    """Return the plan under ``budgets``: ``cpu``, and ``_0`` and so on for accelerators, which are simulated."""
    max_memory = {key.lstrip("_"): str(count) for key, count in budgets.items()}
    hardware = {"devices": [{"memory": "1GB"}] * sum(key != "cpu" for key in budgets), "host": {"memory": "8GB"}}
    config = {"max_memory": max_memory, "device_map": policy, "hardware": hardware, "generate": {}}
    return make_plan(outline, {**config, "storage": {"io": "direct"}})


def planned(outline: Outline, policy: str, budgets: dict[str, int]) -> Plan | str:
    """Return the plan, or what is said where the budgets can't hold one."""
    try:
        return plan_for(outline, policy, **budgets)
    except BudgetError as error:
        return str(error)


def expert_bytes(outline: Outline) -> int:
    return outline.expert_kinds[next(iter(outline.experts))].bytes


def dense_bytes(outline: Outline) -> int:
    return outline.dense.skeleton.bytes


def kept_bytes(outline: Outline) -> int:
    """Return what a host keeps that can't keep all: every token needs it, and not only a row of it."""
    return dense_bytes(outline) - sum(outline.sizes[name] for name in outline.lookups)


def taken(plan: Plan, device: DeviceId) -> int:
    """Return the bytes of the budget of ``device`` that the plan gives to weights, the reserve and slots."""
    return plan.devices[device].weights + plan.devices[device].reserve + plan.devices[device].expert_cache


@pytest.mark.parametrize("name", in_part(NAMES))
def test_what_every_token_needs_stays_and_the_rest_of_the_budget_is_slots(name: str) -> None:
    model = mixture(name)
    plan = plan_for(model, cpu=kept_bytes(model) + 5 * expert_bytes(model) + 3)
    assert {tensor for tensor, home in plan.homes.items() if home == DISK} == model.expert_tensors | model.lookups
    assert set(plan.serving.values()) == {"experts", "rows"}
    assert of(plan, "expert_cache") == {CPU: 5 * expert_bytes(model)}
    assert (of(plan, "reserve"), plan.staging_bytes) == ({}, 3)
    count, together = 6 * len(model.experts), max(2, *(spec.per_token for spec in model.experts.values()))
    assert of(plan, "pool") == {CPU: Pool(count, count * expert_bytes(model), expert_bytes(model), together)}


def test_tables_of_which_a_token_needs_a_row_make_room_for_slots_until_all_experts_have_one() -> None:
    model = mixture("Mixtral")
    table = sum(model.sizes[name] for name in model.lookups)
    plan = plan_for(model, cpu=model.skeleton.bytes - 1)
    assert set(plan.serving.values()) == {"rows"}, "all experts are resident"
    less = plan_for(model, cpu=model.skeleton.bytes - table - 1)
    assert set(less.serving.values()) == {"rows", "experts"}
    assert of(less, "expert_cache") == {CPU: of(less, "pool")[CPU].bytes - expert_bytes(model)}


@pytest.mark.parametrize("name", in_part(NAMES))
def test_a_model_that_fits_has_no_slots(name: str) -> None:
    plan = plan_for(mixture(name), cpu=mixture(name).skeleton.bytes)
    assert (plan.serving, of(plan, "expert_cache"), of(plan, "pool")) == ({}, {}, {})


def test_two_experts_come_before_reading_ahead_and_one_is_enough() -> None:
    model = mixture("Mixtral")
    with pytest.raises(BudgetError) as refusal:
        plan_for(model, cpu=expert_bytes(model))
    words = str(refusal.value).split()
    least = int(words[words.index("bytes", words.index("least")) - 1])
    assert "a slot of 9.22 kB for an expert" in str(refusal.value)
    assert of(plan_for(model, cpu=least), "expert_cache") == {CPU: expert_bytes(model)}
    assert of(plan_for(model, cpu=least + expert_bytes(model)), "expert_cache") == {CPU: 2 * expert_bytes(model)}
    with pytest.raises(BudgetError):
        plan_for(model, cpu=least - 1)


def test_all_experts_of_a_token_have_a_slot_before_weights_that_every_token_needs_stay() -> None:
    model = mixture("Qwen3-MoE")
    together, one = roomy_slots(model), expert_bytes(model)
    assert together == max(spec.per_token for spec in model.experts.values()) > 2
    whole = plan_for(model, cpu=kept_bytes(model) + together * one)
    assert (of(whole, "expert_cache"), of(whole, "reserve")) == ({CPU: together * one}, {})
    less = plan_for(model, cpu=kept_bytes(model) + together * one - 1)
    assert of(less, "expert_cache") == {CPU: together * one}
    assert of(less, "reserve"), "a part of what every token needs is read for each"


@pytest.mark.parametrize(("name", "policy"), in_turn(NAMES, POLICIES))
@many
@given(data=st.data())
def test_a_plan_fits_its_budgets_or_is_refused_in_one_line(name: str, policy: str, data: st.DataObject) -> None:
    model = mixture(name)
    whole = model.skeleton.bytes
    sizes = st.integers(0, whole) | st.integers(0, whole // 10)
    budgets = {key: data.draw(sizes) for key in data.draw(st.sampled_from([["cpu"], ["_0", "cpu"], ["_0", "_1"]]))}
    plan = planned(model, policy, budgets)
    if isinstance(plan, str):
        assert "\n" not in plan
        return
    made = {CPU: sum(model.sizes[name] for name in model.computed if plan.homes[name] == CPU)}
    for device, budget in plan.budgets.items():  # what code makes is there even if no weights are to be
        assert budget is None or taken(plan, device) <= (budget or made.get(device, 0))
    for experts in model.experts.values():
        assert len({plan.serving.get(tensor) for tensor in experts.tensors}) == 1, "all of them alike"
    for device, pool in of(plan, "pool").items():
        assert pool.unit_bytes <= plan.devices[device].expert_cache <= pool.bytes
        assert plan.devices[device].expert_cache % pool.unit_bytes == 0
        assert pool.bytes == pool.unit_bytes * pool.experts
    assert (
        of(plan, "expert_cache").keys()
        == of(plan, "pool").keys()
        == {plan.execution[module] for module, experts in model.experts.items() if experts.tensors[0] in plan.serving}
    )
    for parts in plan.predicted.values():
        assert all(count >= 0 for count in parts.values())


@pytest.mark.parametrize("name", in_part(NAMES))
@many
@given(data=st.data())
def test_more_budget_is_never_fewer_slots_nor_more_bytes_a_token(name: str, data: st.DataObject) -> None:
    model = mixture(name)
    size = st.integers(0, model.skeleton.bytes - 1)
    small, large = sorted((data.draw(size), data.draw(size)))
    less, more = (planned(model, "optimal", {"cpu": size}) for size in (small, large))
    if isinstance(less, str):
        return
    assert isinstance(more, Plan)
    if less.devices[CPU].weights == more.devices[CPU].weights:
        assert less.devices[CPU].expert_cache <= more.devices[CPU].expert_cache
    (fewer, sooner), (streamed, seconds) = (
        [float(plan.forecast[name]) for name in ("streamed_bytes_per_token", "seconds_per_token")]
        for plan in (more, less)
    )
    assert fewer <= streamed or sooner < seconds, "fewer tensors may be sooner than fewer bytes"


@pytest.mark.parametrize("name", in_part(NAMES))
def test_the_second_slot_pushes_out_nothing_that_every_token_needs(name: str) -> None:
    model = mixture(name)
    plans = [planned(model, "optimal", {"cpu": share * model.skeleton.bytes // 200}) for share in range(12, 60, 3)]
    plans_made = [plan for plan in plans if isinstance(plan, Plan)]
    assert {1, 2} <= {plan.devices[CPU].expert_cache // expert_bytes(model) for plan in plans_made}
    counts = [int(plan.forecast["streamed_bytes_per_token"]) for plan in plans_made]
    assert all(more <= 1.04 * less for less, more in pairwise(counts)), "fewer tensors may be sooner than fewer bytes"


@pytest.mark.parametrize("name", in_part(NAMES))
def test_optimal_streams_the_least_of_all_policies(name: str) -> None:
    model = mixture(name)
    for share in (0.1, 0.2, 0.4, 0.6, 0.8, 0.95):
        budgets = {"cpu": int(share * model.skeleton.bytes)}
        plans_made = [planned(model, policy, budgets) for policy in ("optimal", "sequential")]
        counts = [plan.forecast["streamed_bytes_per_token"] for plan in plans_made if isinstance(plan, Plan)]
        assert [int(count) for count in counts] == sorted(int(count) for count in counts)


def test_experts_wait_on_the_host_as_far_as_it_goes_and_compute_from_slots_of_the_accelerators() -> None:
    model = mixture("Qwen3-MoE")
    rest = model.skeleton.bytes - dense_bytes(model)
    both = dense_bytes(model) + 9 * expert_bytes(model)
    plan = plan_for(model, _0=both, cpu=rest // 2)
    assert plan.main_device == 0
    assert {plan.homes[name] for name in model.expert_tensors} == {CPU, DISK}
    assert 0.6 * (rest // 2) < plan.devices[CPU].weights <= rest // 2
    assert of(plan, "expert_cache") == {0: 9 * expert_bytes(model)}
    two = plan_for(model, _0=both // 2, _1=both // 2, cpu=0)
    assert set(of(two, "expert_cache")) == {0, 1}
    assert {home for name, home in two.homes.items() if name not in model.expert_tensors} == {0, 1}


def test_other_policies_keep_whole_layers() -> None:
    model = mixture("Mixtral")
    layers = [layer.name for layer in model.layers if layer.name in model.blocks]
    first = [layer.bytes for layer in model.layers if layer.name not in model.blocks or layer.name == layers[0]]
    reserve = dense_bytes(model) // 3
    plan = plan_for(model, "sequential", cpu=sum(first) + reserve + 3 * expert_bytes(model))
    homes = [{plan.homes[name] for name in model.layer_of[f"{layer}.mlp.gate.weight"].tensors} for layer in layers]
    assert homes == [{CPU}, {DISK}, {DISK}]
    assert of(plan, "pool")[CPU].experts == 12
    assert plan.devices[CPU].expert_cache >= 3 * expert_bytes(model)


def test_of_a_map_that_tears_experts_apart_the_module_is_served_as_a_whole() -> None:
    model = mixture("Mixtral")
    experts = list(model.experts)
    device_map = {"": "cpu", f"{experts[0]}.gate_up_proj": "disk", experts[1]: "disk"}
    plan = plan_for(model, device_map, cpu=model.skeleton.bytes)
    assert plan.serving == {
        f"{experts[0]}.gate_up_proj": "direct", **dict.fromkeys(model.experts[experts[1]].tensors, "experts"),
    }  # fmt: skip
    assert of(plan, "pool")[CPU].experts == 6
    assert of(plan, "reserve") == {CPU: model.sizes[f"{experts[0]}.gate_up_proj"]}


def test_cpu_offload_gb_takes_the_experts_of_a_layer_together() -> None:
    model = mixture("Mixtral")
    first = model.experts[next(iter(model.experts))]
    before = 0
    for name in model.layer_of[first.tensors[0]].owned:
        if name == first.tensors[0]:
            break
        before += model.sizes[name]
    plan = plan_for(model, {"cpu_offload_gb": (before + 1) / 10**9}, _0=10**8, cpu=10**8)
    assert {plan.serving[name] for name in first.tensors} == {"experts"}
    assert of(plan, "expert_cache") == {0: 6 * expert_bytes(model)}


def test_a_token_is_expected_to_bring_the_experts_that_it_uses_and_that_have_no_slot() -> None:
    model = mixture("Mixtral")
    plan = plan_for(model, cpu=kept_bytes(model) + 6 * expert_bytes(model))
    used = 3 * 3 * expert_bytes(model)
    # three layers share six slots: the three that one call doesn't use are for the other two layers
    assert plan.forecast["expert_hit_rate"] == 1.5 / 6
    assert plan.forecast["expert_bytes_per_token"] == plan.forecast["streamed_bytes_per_token"] == used * 3 // 4
    assert plan.used_bytes[CPU] == kept_bytes(model) + used // 4


def test_tokens_of_one_pass_share_experts() -> None:
    experts = mixture("Mixtral").skeleton.experts[0]
    assert [round(Routing(tokens).distinct(experts), 6) for tokens in (1, 2, 1000)] == [3, 4.5, 6]


def test_each_kind_of_experts_has_a_slot_at_least() -> None:
    """The engine gives each kind the part of the pool that it is of all experts there."""
    model = mixture("Mixtral")
    first = model.skeleton.experts[0]
    tensors = [
        replace(spec, shape=(2 * first.count, *spec.shape[1:])) if spec.name in first.tensors else spec
        for spec in model.skeleton.tensors
    ]
    narrow = [replace(spec, shape=(*spec.shape[:-1], 2)) if spec.name in first.tensors else spec for spec in tensors]
    experts = (replace(first, count=2 * first.count), *model.skeleton.experts[1:])
    mixed = Outline(replace(model.skeleton, tensors=tuple(narrow), experts=experts), routes=True)
    small, large = (mixed.expert_kinds[spec.module].bytes for spec in experts[:2])
    plan = plan_for(mixed, cpu=kept_bytes(mixed) + 3 * (small + large))
    (pool,) = of(plan, "pool").values()
    assert (small < large, pool.experts, pool.bytes) == (True, 24, 12 * small + 12 * large)
    shares = [plan.devices[CPU].expert_cache * 12 * kind // pool.bytes for kind in (small, large)]
    assert [share // kind for share, kind in zip(shares, (small, large), strict=True)] == [3, 3]


def test_a_token_computes_with_what_it_is_routed_to() -> None:
    model = mixture("Mixtral")
    assert token_bytes(model) == dense_bytes(model) + 3 * 3 * expert_bytes(model)
    assert token_bytes(replace(model, routes=False)) == model.skeleton.bytes


def test_batches_and_beams_are_tokens_of_a_pass() -> None:
    model = mixture("Mixtral")
    config = {"max_memory": {"cpu": str(kept_bytes(model) + 6 * expert_bytes(model))}, "storage": {"io": "direct"}}
    asked = {"prompts": ["one", "two"], "batch_size": 2, "num_beams": 3, "max_new_tokens": 4}
    plan = make_plan(model, {**config, "device_map": "optimal", "generate": asked})
    used = 6 * (1 - 0.5**6)
    wanted = round(3 * used * expert_bytes(model) * (1 - (6 - used) / 2 / 6))
    assert plan.forecast["expert_bytes_per_token"] == pytest.approx(wanted, abs=2)
    assert plan.pass_tokens == 6


def test_slots_are_a_part_of_the_predicted_peak() -> None:
    model = mixture("Mixtral")
    plan = plan_for(model, _0=dense_bytes(model) + 4 * expert_bytes(model), cpu=model.skeleton.bytes)
    assert plan.predicted[0]["expert_cache"] == 4 * expert_bytes(model)
    assert list(plan.predicted[CPU])[-1] == "simulated"
    assert plan.predicted[CPU]["simulated"] >= dense_bytes(model) + 4 * expert_bytes(model)


def test_what_is_read_into_slots_passes_through_buffers_of_the_host() -> None:
    model = mixture("Mixtral")
    plan = plan_for(model, cpu=kept_bytes(model) + 4 * expert_bytes(model))
    assert plan.predicted[CPU]["expert_cache"] == 4 * expert_bytes(model)
    assert plan.predicted[CPU]["staging"] == 8 * expert_bytes(model), "eight threads, each with an expert at most"
    from_host = plan_for(model, _0=dense_bytes(model) + 4 * expert_bytes(model), cpu=model.skeleton.bytes)
    assert from_host.predicted[CPU]["staging"] == 0


def test_what_is_unpacked_for_slots_of_an_accelerator_passes_through_buffers_of_a_tensor_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = mixture("Mixtral")
    model = at_rest(plain, {name: plain.sizes[name] // 2 for name in plain.expert_tensors})
    monkeypatch.setattr("offstage.stages.plan.predict.CHUNK_BYTES", 1)
    plan = plan_for(model, _0=dense_bytes(model) + 4 * expert_bytes(model), cpu=0)
    largest = max(plain.sizes[name] for name in plain.expert_tensors) // 6
    assert plan.predicted[CPU]["staging"] - plan_for(plain, _0=plan.budgets[0], cpu=0).predicted[CPU]["staging"] == (
        8 * (largest - 1)
    )
    monkeypatch.setattr("offstage.stages.machine.probes.PINNED_BYTES", 1)
    small = plan_for(model, _0=plan.budgets[0], cpu=0).predicted[CPU]["staging"]
    assert small == largest, "one is enough, which several threads unpack into"


def test_plan_and_dispatch_plan_come_back_from_their_files(tmp_path: Path) -> None:
    model = mixture("DeepSeek-V3")
    plan = plan_for(model, cpu=kept_bytes(model) + 6 * expert_bytes(model))
    plan.save(tmp_path)
    assert decode(Plan, json.loads((tmp_path / plans.FILE_NAME).read_text())) == plan
    made = dispatch_plan.make_dispatch_plan(model.skeleton, plan)
    made.save(tmp_path)
    assert decode(dispatch_plan.DispatchPlan, json.loads((tmp_path / dispatch_plan.FILE_NAME).read_text())) == made
    assert made.slots == of(plan, "expert_cache")
    assert {name: part.experts for name, part in made.parts.items() if part.experts} == model.experts
    assert (made.order, made.streamed_bytes, made.reserves) == (tuple(model.experts), 0, {})


def test_the_screen_shows_the_slots() -> None:
    model = mixture("Mixtral")
    plan = plan_for(model, cpu=kept_bytes(model) + 6 * expert_bytes(model))
    cache_line = "expert cache of 6 slots for 18 experts on cpu; hit rate 25% with uniform routing, so 62.21 kB"
    assert f"{cache_line} of experts a token are read" in render(plan)
    assert "slots" in render(plan).splitlines()[-5]


def test_without_the_switch_experts_are_streamed_as_any_weights() -> None:
    model = replace(mixture("Mixtral"), routes=False)
    plan = plan_for(model, cpu=model.skeleton.bytes // 2)
    assert set(plan.serving.values()) == {"direct", "rows"}
    assert (of(plan, "expert_cache"), "expert_hit_rate" in plan.forecast, "expert_cache" in plan.predicted[CPU]) == (
        {},
        False,
        False,
    )


def test_slots_that_prompts_left_empty_are_filled_once() -> None:
    model = mixture("Mixtral")
    budgets = {CPU: kept_bytes(model) + 12 * expert_bytes(model), DISK: None}
    layout = lay_out(model, POLICIES["optimal"](model, budgets), budgets)
    size = layout.slots[CPU]
    assert size == 12 * expert_bytes(model)

    def filled(passes: int, prompt_tokens: int = 0) -> float:
        return traffic(layout, Step(Routing(passes=passes, prompt_tokens=prompt_tokens))).filling

    assert filled(passes=0) == filled(passes=8, prompt_tokens=10**6) == 0, "it doesn't matter, or the prompts did"
    assert filled(passes=1000) == pytest.approx(size / 1000)
    assert 0 < filled(passes=1) <= size
    assert filled(passes=8) > filled(passes=8, prompt_tokens=1) > 0


@pytest.mark.parametrize("name", NAMES)
def test_each_expert_that_the_host_computes_takes_it_calls_beside_those_of_its_module(name: str) -> None:
    outline = mixture(name)
    layout = lay_out(outline, POLICIES["sequential"](outline, {CPU: None}), {CPU: None})
    others = len(outline.skeleton.calls) - len(outline.experts)
    used = sum(spec.per_token for spec in outline.experts.values())
    there = sum(spec.count for spec in outline.experts.values())
    mixtures = 4 * len(outline.experts) + 0.06 * there + 0.8 * used
    assert calls(layout, SINGLE, on_host=False) == 0
    assert calls(layout, SINGLE, on_host=True) == pytest.approx(others + mixtures)
