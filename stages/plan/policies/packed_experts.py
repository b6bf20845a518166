"""How many of a mixture's experts wait on the host packed, as they rest on disk.

They take less there than as they are used, and come from memory in place of storage; what they take is lost to slots,
where the host computes, or to experts that wait as they are used. Some shares of the room are tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from stages.machine.rates import Rates
from stages.plan.expert_slots import ROOMY, SINGLE, expert_traffic, pools, slot_bytes
from stages.plan.outline import Outline
from stages.plan.placement import (
    Budgets,
    Placement,
    find_shortage,
    kept_free,
    offstage,
    reserves,
    resident_bytes,
    streamed_bytes,
)
from stages.plan.policies.even_choice import below, fitting
from stages.plan.token_time import slowest, token_seconds
from stages.units import CPU, DISK, DeviceId

_SHARES = 8


def with_experts_packed(outline: Outline, placement: Placement, budgets: Budgets, rates: Rates) -> Placement:
    """Return ``placement``, or the fastest of those of which some of its experts wait on the host packed."""
    names = [
        name
        for module in offstage(outline, placement)
        for name in outline.experts[module].tensors
        if name in outline.packed
    ]
    if not names or not budgets.get(CPU):
        return placement
    found = [placement, *_packed(outline, placement, budgets, names)]
    return min(found, key=lambda one: _seconds(outline, one, budgets, rates))


def _packed(outline: Outline, placement: Placement, budgets: Budgets, names: Sequence[str]) -> Iterator[Placement]:
    away = replace(placement, homes={**placement.homes, **dict.fromkeys(names, DISK)})
    held, kept = resident_bytes(outline, away.homes).get(CPU, 0), kept_free(outline, away, ROOMY).get(CPU, 0)
    room = (budgets.get(CPU) or 0) - held - kept
    for share in range(1, _SHARES + 1):
        packed = fitting(outline, names, room * share // _SHARES, at_rest=True)
        left = [name for name in names if name not in packed]
        taken = sum(outline.rest_sizes[name] for name in packed)
        used = below(outline, left, placement.main, {CPU: max(0, room - taken)})
        homes = {**away.homes, **used, **dict.fromkeys(packed, CPU)}
        one = Placement(homes, placement.main, frozenset(packed))
        if packed and find_shortage(outline, one, budgets, tight=True) is None:
            yield one


def _seconds(outline: Outline, placement: Placement, budgets: Budgets, rates: Rates) -> float:
    """Return the predicted seconds of a token, with as many slots as the budgets leave room for."""
    waiting = offstage(outline, placement)
    held, kept = resident_bytes(outline, placement.homes, placement.packed), reserves(outline, placement, budgets)
    slots: dict[DeviceId, int] = {}
    for device, pool in pools(outline, waiting).items():
        budget = budgets.get(device, 0)
        room = None if budget is None else budget - held.get(device, 0) - kept.get(device, 0)
        slots[device] = slot_bytes(pool, room, staged=0)
    traffic = expert_traffic(outline, placement.homes, waiting, slots=slots, routing=SINGLE, packed=placement.packed)
    brought = streamed_bytes(outline, placement)
    brought.at_rest.update(traffic.brought.at_rest)
    brought.packed += traffic.brought.packed
    brought.unpacked += traffic.brought.unpacked
    used = resident_bytes(
        outline, {name: home for name, home in placement.homes.items() if name not in outline.expert_tensors}
    )
    for there in (traffic.found, traffic.resident):
        for device, count in there.items():
            used[device] = used.get(device, 0) + round(count)
    return slowest(token_seconds(brought, used, main=placement.main, rates=rates))[1]
