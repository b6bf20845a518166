"""From a placement to the plan that the later stages follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from offstage.stages.empty_init.skeleton import parent
from offstage.stages.plan.budgets import Allowance
from offstage.stages.plan.checks import require_fit
from offstage.stages.plan.expert_slots import Pool, offstage_in, pools, slot_bytes
from offstage.stages.plan.options import EXPLICIT, OFFLOAD
from offstage.stages.plan.outline import Layer, Outline
from offstage.stages.plan.placement import (
    Budgets,
    Placement,
    execution_devices,
    fold,
    least_slots,
    reserves,
    resident_bytes,
    unpacking_rooms,
)
from offstage.stages.plan.plan import Plan
from offstage.stages.plan.row_blocks import block_rows
from offstage.stages.plan.serving import Io, Serving, serve
from offstage.stages.units import CPU, DISK, DeviceId, format_bytes, in_tier_order

_ASKED_FOR = {EXPLICIT: "the map says so", OFFLOAD: f"{OFFLOAD} asks for it"}
"""Why a layer lies elsewhere than where it computes, under the policies that don't go by what is full."""


def assemble(outline: Outline, placement: Placement, allowance: Allowance, *, policy: str, io: Io) -> Plan:
    """Return the plan of ``placement``. Raises ``BudgetError`` where it is more than the budgets can hold."""
    require_fit(outline, placement, allowance.budgets)
    skeleton = outline.skeleton
    computing = execution_devices(outline, placement)
    held = resident_bytes(outline, placement.homes, placement.packed)
    devices = in_tier_order([*allowance.budgets, *held])
    homes = {name: placement.homes[skeleton.leader(name)] for name in outline.sizes}
    execution = {
        module: computing[outline.layer_of[tensors[0]].name] for module, tensors in outline.direct.items() if tensors
    }
    serving = serve(outline, homes, execution, io=io, packed=placement.packed)
    kept = reserves(outline, placement, allowance.budgets)
    sharing = pools(outline, offstage_in(outline, serving, execution))
    unpacking = _unpacking(outline, placement, allowance.budgets, held=held, kept=kept)
    beside = Counter(kept) + Counter(unpacking)
    return Plan(
        policy=policy,
        main_device=placement.main,
        device_map=fold(outline, placement.homes),
        homes=homes,
        execution=execution,
        serving=serving,
        budgets={device: allowance.budgets.get(device) for device in devices},
        resident_bytes={device: held.get(device, 0) for device in devices},
        reserves=kept,
        reasons={layer.name: _reason(outline, layer, placement, computing, policy) for layer in outline.layers},
        pools=sharing,
        slots=share_slots(outline, serving, sharing, budgets=allowance.budgets, held=held, kept=beside),
        unpacking=unpacking,
        packed=_packed(outline, placement),
        packed_on_host=tuple(name for name in outline.sizes if skeleton.leader(name) in placement.packed),
        block_rows=block_rows(outline, _brought(serving), execution, kept, least=allowance.by_blocks),
        tied={name: skeleton.leader(name) for name in outline.sizes if skeleton.leader(name) != name},
        notes=allowance.notes,
        host_layers=tuple(name for name, device in placement.computes.items() if device == CPU != placement.main),
        budget_terms=allowance.terms,
    )


def _unpacking(
    outline: Outline,
    placement: Placement,
    budgets: Budgets,
    *,
    held: Mapping[DeviceId, int],
    kept: Mapping[DeviceId, int],
) -> dict[DeviceId, int]:
    """Return the bytes by which accelerators unpack that are to, where their budgets leave them."""
    slots = least_slots(outline, placement)
    found = {}
    for device, room in unpacking_rooms(outline, placement).items() if placement.unpacks else ():
        budget, taken = budgets.get(device, 0), held.get(device, 0) + kept.get(device, 0) + slots.get(device, 0)
        if device in placement.unpacks and (budget is None or taken + room <= budget):
            found[device] = room
    return found


def _packed(outline: Outline, placement: Placement) -> dict[str, dict[str, int]]:
    """Return the bytes that lie packed by codec and device, and as they are used."""
    found: dict[str, dict[str, int]] = {}
    for name, device in placement.homes.items():
        if name in outline.packed and (device == DISK or name in placement.packed):
            told = found.setdefault(outline.packed[name].codec, {"used": 0})
            told["used"] += outline.sizes[name]
            told[str(device)] = told.get(str(device), 0) + outline.rest_sizes[name]
    return found


def lying_bytes(outline: Outline, plan: Plan) -> dict[str, int]:
    """Return the bytes of every tensor where it lies."""
    at_rest = {name for name, home in plan.homes.items() if home == DISK} | set(plan.packed_on_host)
    return {name: (outline.rest_sizes if name in at_rest else outline.sizes)[name] for name in outline.sizes}


def share_slots(
    outline: Outline,
    serving: Mapping[str, Serving],
    sharing: Mapping[DeviceId, Pool],
    *,
    budgets: Budgets,
    held: Mapping[DeviceId, int],
    kept: Mapping[DeviceId, int],
) -> dict[DeviceId, int]:
    """Return the bytes of slots on each device of ``sharing``: what its budget leaves beside all else.

    That is the weights ``held`` there, the reserve ``kept``, and on the host what reading ahead takes beyond that.
    """
    found = {}
    for device, pool in sharing.items():
        budget, reserve = budgets.get(device, 0), kept.get(device, 0)
        room = None if budget is None else budget - held.get(device, 0) - reserve
        staged = max(0, _two_parts(outline, serving) - reserve) if device == CPU else 0
        found[device] = slot_bytes(pool, room, staged=staged)
    return found


def _brought(serving: Mapping[str, Serving]) -> list[str]:
    """Return the tensors that come into memory that is kept free for them, for each use."""
    return [name for name, how in serving.items() if how in ("direct", "copy", "packed")]


def _two_parts(outline: Outline, serving: Mapping[str, Serving]) -> int:
    """Return the bytes of the two largest parts that the host reads for each use: what one module holds is a part."""
    parts = Counter[str]()
    for name in serving:
        if serving[name] in ("direct", "packed"):
            parts[parent(name)] += outline.sizes[name]
    return sum(sorted(parts.values())[-2:])


def _reason(
    outline: Outline, layer: Layer, placement: Placement, computing: Mapping[str, DeviceId], policy: str
) -> str:
    """Return why ``layer`` lies where it does, in words."""
    leaders = dict.fromkeys(map(outline.skeleton.leader, layer.tensors))
    homes = in_tier_order(placement.homes[leader] for leader in leaders)
    size = format_bytes(sum(outline.sizes[leader] for leader in leaders))
    where = " and ".join(str(home) for home in homes)
    device = computing[layer.name]
    if homes == [device]:
        chosen = device == CPU != placement.main
        return f"{size} resident on {where}{', which computes it: faster than over the link' * chosen}"
    cause = _ASKED_FOR.get(policy, "the faster devices are full" if DISK in homes else "the accelerators are full")
    away = {leader for leader in leaders if placement.homes[leader] != device}
    how = "its experts brought to" if away <= outline.expert_tensors else "streamed to"
    return f"{size} on {where}, {how} {device}: {cause}"
