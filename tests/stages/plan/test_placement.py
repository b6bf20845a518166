"""Where layers compute, and what each device that streams keeps free."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from offstage.pipeline.errors import BudgetError
from offstage.stages.dispatch.dispatch_plan import make_dispatch_plan
from offstage.stages.plan.layout import lay_out
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.placement import Placement, execution_devices
from offstage.stages.plan.plan import Plan
from offstage.stages.plan.policies.explicit import override
from offstage.stages.units import CPU, DISK
from tests.stages.plan.plans import make_plan, of
from tests.stages.plan.skeletons import outline, stack


def halves(count: int = 4) -> Outline:
    """A model of layers that have two tensors each, ``a`` of 10 bytes and ``b`` of 20."""
    tensors = {f"l.{index}.{name}": size for index in range(count) for name, size in (("a", 10), ("b", 20))}
    return outline(tensors, classes={f"l.{index}": "Block" for index in range(count)}, no_split=["Block"])


def mapped(model: Outline, device_map: dict[str, Any], **max_memory: str) -> Plan:
    hardware = {"devices": [{"memory": "1GB"}] * 2}
    budgets = {key.lstrip("_"): size for key, size in max_memory.items()}
    config = {"max_memory": budgets, "device_map": device_map, "hardware": hardware, "generate": {}}
    return make_plan(model, {**config, "storage": {"io": "direct"}})


def test_a_layer_computes_where_the_placement_says_whatever_lies_where() -> None:
    model, homes = stack(4), {f"layers.{index}.weight": CPU for index in range(4)}
    placement = Placement(homes, 0, computes={"layers.1": 1, "layers.2": CPU})
    assert list(execution_devices(model, placement).values()) == [0, 1, CPU, 0]
    assert lay_out(model, placement).layer_reserves == {0: 10, 1: 10}


def test_an_override_to_an_accelerator_has_the_layer_compute_there() -> None:
    model = halves(2)
    placement = Placement(dict.fromkeys(model.sizes, CPU), 0, computes={"l.0": 1, "l.1": 1})
    moved = override(model, placement, {"l.0.a": 0, "l.1.a": DISK})
    assert execution_devices(model, moved) == {"l.0": 0, "l.1": 1}


def test_each_accelerator_that_streams_has_its_reserve_in_the_plan_its_peak_and_the_engine() -> None:
    model = halves()
    device_map = {f"l.{index}.{name}": index % 2 if name == "a" else "disk" for index in range(4) for name in "ab"}
    plan = mapped(model, device_map, _0="40", _1="45", cpu="1GB")
    assert of(plan, "reserve") == {0: 20, 1: 20}
    assert [plan.predicted[device]["reserve"] for device in (0, 1, CPU)] == [20, 20, 0]
    assert plan.predicted[CPU]["staging"] == 40, "what is read for either passes through the host"
    assert make_dispatch_plan(model.skeleton, plan).reserves == of(plan, "reserve")


def test_what_code_makes_counts_on_the_host_wherever_a_placement_has_it() -> None:
    plain = outline({"a.weight": 10, "a.angles": 4, "b.weight": 10})
    made = tuple(replace(spec, persistent=spec.name != "a.angles") for spec in plain.skeleton.tensors)
    model = replace(plain, skeleton=replace(plain.skeleton, tensors=made))
    plan = mapped(model, {"": "disk"}, cpu="14")
    assert (plan.devices[CPU].weights, plan.devices[CPU].reserve) == (4, 10)
    assert plan.predicted[CPU]["weights"] == 4
    with pytest.raises(BudgetError, match=r"can.t hold 4 B of weights .*the least that works is 14 bytes"):
        mapped(model, {"": "disk"}, cpu="13")
    assert mapped(model, {"a": "disk", "b": 0}, cpu="0", _0="24").homes["a.angles"] == CPU, (
        "that no weights lie there is kept"
    )


def test_a_pass_takes_its_memory_again_where_what_it_computes_with_is_little_of_all() -> None:
    plan = mapped(halves(), {"": "cpu"}, cpu="1GB")

    def reuses(**ledger: int) -> bool:
        devices = {**plan.devices, CPU: replace(plan.devices[CPU], ledger=ledger)}
        return make_dispatch_plan(halves().skeleton, replace(plan, devices=devices)).reuses

    assert reuses(weights=980, activations=10, scratch=5)
    assert not reuses(weights=980, activations=10, scratch=10)
    assert not reuses(weights=980), "nothing is known of what it computes with"
    assert reuses(weights=8000, activations=80, cache=40)
    assert not reuses(weights=8000, activations=80, cache=80), "mapped otherwise"
    assert reuses(weights=8000, activations=80, cache=80, heap=60), "in the heap anyway, and part of the peak"
