"""Plans of a model under a config, on the machine that this describes: made as the stage makes them, without a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from offstage.pipeline.stage import Config
from offstage.pipeline.typed_config import read
from offstage.stages.empty_init.skeleton import parent
from offstage.stages.machine.hardware import hardware
from offstage.stages.machine.kernels import NOMINAL, Kernels
from offstage.stages.machine.rates import Rates, read_rates
from offstage.stages.plan.inputs import gather_inputs
from offstage.stages.plan.layout import lay_out
from offstage.stages.plan.lossless import possible_packing
from offstage.stages.plan.memory_needs import MemoryNeeds
from offstage.stages.plan.options import PlanConfig
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.placement import Placement
from offstage.stages.plan.plan import AlikeLayers, DevicePlan, Plan
from offstage.stages.plan.predict import predict
from offstage.stages.plan.serving import Io, Line, Serving
from offstage.stages.plan.soonest_plan import plan_from
from offstage.stages.units import DeviceId


def make_plan(
    outline: Outline,
    config: Config,
    *,
    rates: Rates | None = None,
    kernels: Kernels = NOMINAL,
) -> Plan:
    """Return the plan of the model under ``config`` on the machine that it describes; see ``plan_from``.

    ``rates`` and ``kernels`` are those of the machine; by default what the config gives, or nominal ones.
    """
    rates = rates or read_rates(config.get("hardware") or {})
    storage, machine = read(PlanConfig, config).storage, hardware(config)
    packing = possible_packing(storage, outline, config)
    inputs = gather_inputs(outline, config, machine=machine, rates=rates, kernels=kernels, packing=packing)
    return plan_from(inputs)


def of(plan: Plan, part: str) -> dict[DeviceId, Any]:
    """Return what each device of ``plan`` has of ``part``, those without any left out."""
    parts = {device: getattr(one, part) for device, one in plan.devices.items()}
    return {device: count for device, count in parts.items() if count or (part == "simulated" and count is not None)}


def plan_by_hand(
    homes: Mapping[str, DeviceId],
    execution: Mapping[str, DeviceId] = {},
    serving: Mapping[str, Serving] = {},
    *,
    main: DeviceId = "cpu",
    devices: Mapping[DeviceId, DevicePlan] = {},
    **changes: Any,
) -> Plan:
    """Return a plan that has each tensor where ``homes`` say; what isn't in ``execution`` computes on the host."""
    lines = [
        Line(name, home, execution.get(parent(name), "cpu"), 0, 0, serving=serving.get(name))
        for name, home in homes.items()
    ]
    tables = {"cpu": DevicePlan(None, 0), **devices}
    return Plan("explicit", main, tables, (AlikeLayers(("",), tuple(lines)),), **changes)


def with_lines(plan: Plan, change: Callable[[Line], Line]) -> Plan:
    """Return ``plan`` with each of its lines changed."""
    lines = tuple(change(line) for line in plan.tensors.values())
    return replace(plan, layers=(AlikeLayers(("",), lines),))


def predicted(outline: Outline, plan: Plan, needs: MemoryNeeds, rates: Rates, *, io: Io = "direct") -> Plan:
    """Return ``plan`` with what is predicted of it where a request takes ``needs``."""
    leaders = {name: home for name, home in plan.homes.items() if outline.skeleton.leader(name) == name}
    packed = frozenset(name for name in plan.loading.packed_on_host if outline.skeleton.leader(name) == name)
    placement = Placement(leaders, plan.main_device, packed, unpacks=frozenset(of(plan, "dequantising")))
    layout = lay_out(outline, placement, plan.budgets, io=io, homes=plan.homes, execution=plan.execution)
    return predict(layout, plan, needs, rates)
