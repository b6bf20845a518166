"""From a placement to the plan that the later stages follow."""

from __future__ import annotations

from collections.abc import Mapping

from offstage.stages.plan.budgets import Allowance
from offstage.stages.plan.checks import require_fit
from offstage.stages.plan.layout import Layout, lay_out
from offstage.stages.plan.options import EXPLICIT, OFFLOAD
from offstage.stages.plan.outline import Layer, Outline
from offstage.stages.plan.placement import Placement, fold
from offstage.stages.plan.plan import Plan
from offstage.stages.plan.serving import Io
from offstage.stages.units import CPU, DISK, format_bytes, in_tier_order

_ASKED_FOR = {EXPLICIT: "the map says so", OFFLOAD: f"{OFFLOAD} asks for it"}
"""Why a layer lies elsewhere than where it computes, under the policies that don't go by what is full."""


def assemble(
    outline: Outline, placement: Placement, allowance: Allowance, *, policy: str, io: Io = "direct"
) -> tuple[Plan, Layout]:
    """Return the plan of ``placement``. Raises ``BudgetError`` where it is more than the budgets can hold."""
    layout = lay_out(outline, placement, allowance.budgets, io=io)
    require_fit(layout)
    return plan_of(layout, policy=policy, notes=allowance.notes, budget_terms=allowance.terms), layout


def plan_of(
    layout: Layout, *, policy: str, notes: tuple[str, ...] = (), budget_terms: Mapping[str, Mapping[str, int]] = {}
) -> Plan:
    """Return the plan that has everything lie as ``layout`` says."""
    outline, lines, rooms = layout.outline, layout.by_name, layout.rooms
    return Plan(
        policy=policy,
        main_device=layout.placement.main,
        device_map=fold(outline, layout.placement.homes),
        homes={name: lines[name].home for name in outline.sizes},
        execution=layout.execution,
        serving=layout.serving,
        budgets={device: room.budget for device, room in rooms.items()},
        resident_bytes={device: room.weights for device, room in rooms.items()},
        reserves=layout.reserves,
        reasons={layer.name: _reason(layout, layer, policy) for layer in outline.layers},
        pools=layout.pools,
        slots=layout.slots,
        unpacking=layout.unpacking,
        packed=_packed(layout),
        packed_on_host=tuple(name for name in outline.sizes if lines[name].at_rest and lines[name].home == CPU),
        block_rows=layout.block_rows,
        tied={name: lines[name].leader for name in outline.sizes if lines[name].leader != name},
        notes=notes,
        host_layers=layout.host_layers,
        budget_terms=budget_terms,
    )


def lying_bytes(outline: Outline, plan: Plan) -> dict[str, int]:
    """Return the bytes of every tensor where it lies."""
    at_rest = {name for name, home in plan.homes.items() if home == DISK} | set(plan.packed_on_host)
    return {name: (outline.rest_sizes if name in at_rest else outline.sizes)[name] for name in outline.sizes}


def _packed(layout: Layout) -> dict[str, dict[str, int]]:
    """Return the bytes that lie packed by codec and device, and as they are used."""
    found: dict[str, dict[str, int]] = {}
    for line in layout.lines:
        if line.at_rest and line.name == line.leader:
            told = found.setdefault(layout.outline.packed[line.name].codec, {"used": 0})
            told["used"] += line.used
            told[str(line.home)] = told.get(str(line.home), 0) + line.bytes
    return found


def _reason(layout: Layout, layer: Layer, policy: str) -> str:
    """Return why ``layer`` lies where it does, in words."""
    lines = list({layout.by_name[name].leader: layout.by_name[name] for name in layer.tensors}.values())
    homes = in_tier_order(line.home for line in lines)
    size, where = format_bytes(sum(line.used for line in lines)), " and ".join(str(home) for home in homes)
    device = lines[0].computes
    if homes == [device]:
        chosen = device == CPU != layout.placement.main
        return f"{size} resident on {where}{', which computes it: faster than over the link' * chosen}"
    cause = _ASKED_FOR.get(policy, "the faster devices are full" if DISK in homes else "the accelerators are full")
    away = {line.leader for line in lines if line.home != device}
    how = "its experts brought to" if away <= layout.outline.expert_tensors else "streamed to"
    return f"{size} on {where}, {how} {device}: {cause}"
