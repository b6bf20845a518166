"""From a placement to the plan that the later stages follow."""

from __future__ import annotations

from collections.abc import Mapping

from stages.plan.budgets import Allowance
from stages.plan.checks import require_fit
from stages.plan.outline import Layer, Outline
from stages.plan.placement import Placement, execution_devices, fold, reserves, resident_bytes
from stages.plan.plan import Plan
from stages.plan.serving import Io, serve
from stages.units import DISK, DeviceId, format_bytes, in_tier_order


def assemble(outline: Outline, placement: Placement, allowance: Allowance, *, policy: str, io: Io) -> Plan:
    """Return the plan of ``placement``. Raises ``BudgetError`` where it is more than the budgets can hold."""
    require_fit(outline, placement, allowance.budgets)
    skeleton = outline.skeleton
    computing = execution_devices(outline, placement)
    held = resident_bytes(outline, placement.homes)
    devices = in_tier_order([*allowance.budgets, *held])
    homes = {name: placement.homes[skeleton.leader(name)] for name in outline.sizes}
    execution = {
        module: computing[outline.layer_of[tensors[0]].name] for module, tensors in outline.direct.items() if tensors
    }
    return Plan(
        policy=policy,
        main_device=placement.main,
        device_map=fold(outline, placement.homes),
        homes=homes,
        execution=execution,
        serving=serve(outline, homes, execution, io=io),
        budgets={device: allowance.budgets.get(device) for device in devices},
        resident_bytes={device: held.get(device, 0) for device in devices},
        reserve_bytes=reserves(outline, placement).get(placement.main, 0),
        reasons={layer.name: _reason(outline, layer, placement, computing) for layer in outline.layers},
        notes=allowance.notes,
        budget_terms=allowance.terms,
    )


def _reason(outline: Outline, layer: Layer, placement: Placement, computing: Mapping[str, DeviceId]) -> str:
    """Return why ``layer`` lies where it does, in words."""
    leaders = dict.fromkeys(map(outline.skeleton.leader, layer.tensors))
    homes = in_tier_order(placement.homes[leader] for leader in leaders)
    size = format_bytes(sum(outline.sizes[leader] for leader in leaders))
    where = " and ".join(str(home) for home in homes)
    device = computing[layer.name]
    if homes == [device]:
        return f"{size} resident on {where}"
    cause = "the faster devices are full" if DISK in homes else "the accelerators are full"
    return f"{size} on {where}, streamed to {device}: {cause}"
