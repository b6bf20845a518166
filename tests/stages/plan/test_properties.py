"""What holds for every policy, over random module trees with ties, buffers, mixed dtypes and odd budgets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import nn

from offstage.pipeline.errors import BudgetError
from offstage.stages.empty_init.describe import describe
from offstage.stages.machine.rates import Rates
from offstage.stages.plan.checks import require_fit
from offstage.stages.plan.layout import lay_out
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.placement import (
    Budgets,
    Placement,
    all_homes,
    execution_devices,
    fold,
    held_bytes,
    main_device,
    resident_bytes,
)
from offstage.stages.plan.policies import POLICIES
from offstage.stages.plan.policies.explicit import explicit, spread
from offstage.stages.plan.traffic import PLAIN_STEP, forecast
from offstage.stages.units import DeviceId, in_tier_order
from tests.long_form import LONG_FORM, in_part

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]
many = settings(
    max_examples=60 if os.environ.get(LONG_FORM) else 30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


class Block(nn.Module):
    """A module that isn't split."""


class Group(nn.Module):
    """A module that is split."""


@st.composite
def modules(draw: st.DrawFn, depth: int = 3) -> nn.Module:
    module = draw(st.sampled_from([Block, Group]))()
    for index in range(draw(st.integers(0, 2))):
        size, dtype = draw(st.integers(0, 40)), draw(st.sampled_from(DTYPES))
        tensor = torch.empty(size, dtype=dtype, device="meta")
        if dtype.is_floating_point and draw(st.booleans()):
            module.register_parameter(f"p{index}", nn.Parameter(tensor))
        else:
            module.register_buffer(f"b{index}", tensor, persistent=draw(st.booleans()))
    for index in range(draw(st.integers(0, 3)) if depth else 0):
        module.add_module(f"m{index}", draw(modules(depth=depth - 1)))
    return module


@st.composite
def models(draw: st.DrawFn, *, ties: bool = True) -> nn.Module:
    model = Group()
    for index in range(draw(st.integers(1, 4))):
        model.add_module(f"top{index}", draw(modules()))
    owners = [(module, name) for module in model.modules() for name in module._parameters]
    for _ in range(draw(st.integers(0, 2)) if ties and len(owners) > 1 else 0):
        (owner, name), (tied, other) = draw(st.sampled_from(owners)), draw(st.sampled_from(owners))
        tied.register_parameter(other, owner._parameters[name])
    return model


@st.composite
def cases(draw: st.DrawFn, *, ties: bool = True) -> tuple[nn.Module, Outline, dict[DeviceId, int | None]]:
    model = draw(models(ties=ties))
    outline = Outline(describe(model, no_split=["Block"], rehearsed=False))
    whole = outline.skeleton.bytes
    keys = draw(st.lists(st.sampled_from([0, 1, 3, "cpu"]), unique=True, max_size=4))
    budgets: dict[DeviceId, int | None] = {key: draw(st.integers(0, max(1, whole))) for key in in_tier_order(keys)}
    return model, outline, {"cpu": 0, **budgets, "disk": None}


def place(outline: Outline, budgets: Mapping[DeviceId, int | None], policy: str) -> Placement | None:
    """Return the placement, or None where the policy's answer is that none fits."""
    placement = POLICIES[policy](outline, budgets)
    try:
        require_fit(lay_out(outline, placement, budgets))
    except BudgetError:
        return None
    return placement


@pytest.mark.parametrize("policy", in_part(POLICIES, every=3))
@many
@given(case=cases())
def test_every_tensor_is_placed_once_and_no_budget_is_exceeded(policy: str, case: Any) -> None:
    _, outline, budgets = case
    placement = place(outline, budgets, policy)
    if placement is None:
        return
    assert set(placement.homes) == {outline.skeleton.leader(name) for name in outline.sizes}
    resident, kept = resident_bytes(outline, placement.homes), lay_out(outline, placement, budgets).reserves
    for device in {*resident, *kept}:
        budget = budgets[device]
        assert budget is None or resident.get(device, 0) + kept.get(device, 0) <= budget
    assert all(isinstance(device, int) or device == placement.main for device in kept), "reserves where things compute"


@pytest.mark.parametrize("policy", in_part(POLICIES, every=3))
@many
@given(case=cases())
def test_the_map_says_what_the_homes_say_and_reads_back_to_the_same_placement(policy: str, case: Any) -> None:
    _, outline, budgets = case
    placement = place(outline, budgets, policy)
    if placement is None:
        return
    device_map = fold(all_homes(outline, placement.homes))
    homes = spread(outline, device_map)
    assert homes == {name: placement.homes[outline.skeleton.leader(name)] for name in outline.sizes}
    again = explicit(outline, device_map)
    assert again.homes == placement.homes
    assert again.main == placement.main or main_device(placement.homes) == "cpu"


@pytest.mark.parametrize("policy", ["sequential", "balanced", "balanced_low_0"])
def test_what_fits_just_so_is_computed_by_the_first_device_of_its_map(policy: str) -> None:
    model = Group()
    model.add_module("small", Block())
    model.add_module("large", Block())
    model.small.register_parameter("weight", nn.Parameter(torch.empty(1, device="meta")))
    model.large.register_buffer("made", torch.empty(4, device="meta"), persistent=False)
    outline = Outline(describe(model, no_split=["Block"], rehearsed=False))
    placement = place(outline, {"cpu": 0, 0: 16, 1: 4, "disk": None}, policy)
    assert placement is not None
    assert placement.main == 0
    assert explicit(outline, placement.homes).main in (0, "cpu")


@pytest.mark.parametrize("policy", POLICIES)
@many
@given(case=cases())
def test_a_layer_computes_on_one_device_and_what_is_offloaded_on_one_that_streams(policy: str, case: Any) -> None:
    _, outline, budgets = case
    placement = place(outline, budgets, policy)
    if placement is None:
        return
    for layer in outline.layers:
        device = execution_devices(outline, placement)[layer.name]
        homes = {placement.homes[name] for name in layer.owned}
        assert len(homes) <= 1 or policy == "optimal"
        assert homes <= {device} or device == placement.main or (policy == "optimal" and isinstance(device, int))


@many
@given(case=cases())
def test_sequential_never_goes_back(case: Any) -> None:
    _, outline, budgets = case
    placement = place(outline, budgets, "sequential")
    if placement is not None:
        devices = [placement.homes[layer.owned[0]] for layer in outline.layers if layer.bytes]
        order = in_tier_order(devices)
        assert devices == sorted(devices, key=order.index)


@pytest.mark.parametrize("policy", POLICIES)
@many
@given(case=cases())
def test_no_policy_is_worse_than_sequential(policy: str, case: Any) -> None:
    _, outline, budgets = case
    ours, first = (place(outline, budgets, name) for name in (policy, "sequential"))
    if first is not None:
        assert ours is not None
        assert worth(outline, ours, budgets, policy) >= worth(outline, first, budgets, policy)


@many
@given(case=cases(ties=False))
def test_a_refusal_names_the_least_budget_that_works(case: Any) -> None:
    _, outline, budgets = case
    placement = POLICIES["sequential"](outline, budgets)
    try:
        require_fit(lay_out(outline, placement, budgets))
    except BudgetError as error:
        words = str(error).split()
        device = words[0].removeprefix("max_memory.").rstrip(":")
        least = int(words[words.index("bytes", words.index("least")) - 1])
        key = int(device) if device.isdigit() else device
        assert refused(outline, {**budgets, key: least}) != device
        assert refused(outline, {**budgets, key: least - 1}) == device


def refused(outline: Outline, budgets: Mapping[DeviceId, int | None]) -> str | None:
    """Return which device's budget the policy that fills them in order calls too small; null where none is."""
    try:
        require_fit(lay_out(outline, POLICIES["sequential"](outline, budgets), budgets))
    except BudgetError as error:
        return str(error).split()[0].removeprefix("max_memory.").rstrip(":")
    return None


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.filterwarnings("ignore:Current model requires")
@many
@given(case=cases())
def test_it_is_as_good_as_accelerates_placement(policy: str, case: Any) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, outline, budgets = case
    theirs = _theirs(accelerate, model, budgets, policy)
    if theirs is None or set(outline.sizes) - set(spread_known(outline, theirs)):
        return
    homes = spread_known(outline, theirs)
    if any(homes[name] != homes[outline.skeleton.leader(name)] for name in outline.sizes):
        return
    if any(homes[name] == "disk" for name in outline.computed):
        return  # no file has it, so it takes the host's memory, whatever the map says
    leaders = {name: homes[name] for name in outline.sizes if outline.skeleton.leader(name) == name}
    weighty = {name: home for name, home in leaders.items() if outline.sizes[name]}  # nothing computes an empty tensor
    other = Placement(leaders, main_device(weighty))
    try:
        require_fit(lay_out(outline, other, budgets))
    except BudgetError:
        return
    ours = place(outline, budgets, policy)
    assert ours is not None
    if policy == "optimal" and other.main == "cpu" != ours.main:
        return  # whether the host computes in an accelerator's place is weighed by execution=fastest alone
    if policy == "optimal" and not lay_out(outline, ours, budgets).kept_free():
        assert ours.homes == place(outline, budgets, "balanced").homes
        return  # what is all there is evenly there, if one device fewer would take one crossing fewer
    assert worth(outline, ours, budgets, policy) >= worth(outline, other, budgets, policy)


def worth(outline: Outline, placement: Placement, budgets: Budgets, policy: str) -> tuple[float, ...]:
    """Return what the policy makes the most of: what is held, or for ``optimal`` the speed of a token."""
    if policy != "optimal":
        return held_bytes(outline, placement.homes)
    return (-forecast(lay_out(outline, placement, budgets), PLAIN_STEP, Rates()).seconds,)


def spread_known(outline: Outline, device_map: Mapping[str, DeviceId]) -> dict[str, DeviceId]:
    return spread(outline, {name: home for name, home in device_map.items() if name in outline.names})


def _theirs(accelerate: Any, model: nn.Module, budgets: Mapping[DeviceId, int | None], policy: str) -> Any:
    limits = {device: budget for device, budget in budgets.items() if budget is not None}
    try:
        if policy != "sequential":
            low = policy == "balanced_low_0"
            limits = accelerate.utils.get_balanced_memory(
                model, max_memory=dict(limits), no_split_module_classes=["Block"], low_zero=low
            )
        return accelerate.infer_auto_device_map(model, max_memory=dict(limits), no_split_module_classes=["Block"])
    except (ValueError, KeyError, IndexError, AttributeError, ZeroDivisionError):
        return None
