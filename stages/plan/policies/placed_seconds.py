"""How long a token takes under a placement: what a policy compares, before there is a plan."""

from __future__ import annotations

from offstage.stages.machine.rates import Rates
from offstage.stages.plan.expert_slots import SINGLE, expert_traffic, host_share, pools, slot_bytes
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.placement import (
    Budgets,
    Placement,
    computed_bytes,
    execution_devices,
    offstage,
    reserves,
    resident_bytes,
    streamed_bytes,
)
from offstage.stages.plan.token_time import ONE_TOKEN, LayerOutput, expected_seconds, token_seconds
from offstage.stages.units import CPU, DeviceId


def placed_seconds(
    outline: Outline,
    placement: Placement,
    budgets: Budgets,
    rates: Rates,
    *,
    output: LayerOutput = ONE_TOKEN,
    members: float = 1,
) -> float:
    """Return the predicted seconds of a token, with as many slots as the budgets leave room for.

    A pass has a token for each of ``members``, or rather what the ``output`` of a layer says.
    """
    waiting = offstage(outline, placement)
    held, kept = resident_bytes(outline, placement.homes, placement.packed), reserves(outline, placement, budgets)
    slots: dict[DeviceId, int] = {}
    for device, pool in pools(outline, waiting).items():
        budget = budgets.get(device, 0)
        room = None if budget is None else budget - held.get(device, 0) - kept.get(device, 0)
        slots[device] = slot_bytes(pool, room, staged=0)
    traffic = expert_traffic(outline, placement.homes, waiting, slots=slots, routing=SINGLE, packed=placement.packed)
    brought = streamed_bytes(outline, placement)
    brought.include(traffic.brought)
    computing = execution_devices(outline, placement)
    used = computed_bytes(outline, placement, without=outline.expert_tensors)
    for there in (traffic.found, traffic.resident):
        for device, count in there.items():
            if device in computing.values():  # what waits on the host is read by links
                used[device] = used.get(device, 0) + round(count)
    beside = CPU in computing.values() and placement.main != CPU
    share = host_share(outline, computing, output) if beside else None
    return expected_seconds(token_seconds(brought, used, rates=rates, members=members, reserves=kept, on_host=share))
