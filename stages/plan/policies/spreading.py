"""Loads by caps: even ones, what ``balanced`` and ``balanced_low_0`` share, and those of the fastest memories first.

Filling in order under a cap reaches furthest of all ways to cut the model into consecutive stretches, so the smallest
cap that holds as much gives the smallest possible maximum, also where layers differ in size. (It is the linear
partition problem, solved by bisection on its answer.)
"""

from __future__ import annotations

from collections.abc import Collection

from offstage.stages.machine.rates import Rates
from offstage.stages.plan.filling import fill
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.placement import Budgets, held_bytes
from offstage.stages.units import DeviceId, in_tier_order


def accelerators(budgets: Budgets) -> list[DeviceId]:
    """Return the accelerators among the devices of ``budgets``, in order."""
    return [device for device in in_tier_order(budgets) if isinstance(device, int)]


def limit(outline: Outline, budgets: Budgets, devices: Collection[DeviceId]) -> Budgets:
    """Return ``budgets`` with the smallest cap on ``devices`` under which all accelerators hold as much as without."""
    if not devices:
        return budgets
    target = held_bytes(outline, fill(outline, budgets))[0]
    low, high = 0, outline.skeleton.bytes
    while low < high:
        middle = (low + high) // 2
        held = held_bytes(outline, fill(outline, _capped(budgets, devices, middle)))[0]
        low, high = (low, middle) if held >= target else (middle + 1, high)
    return _capped(budgets, devices, low)


def _capped(budgets: Budgets, devices: Collection[DeviceId], cap: int) -> dict[DeviceId, int | None]:
    caps = {device: cap if room is None else min(room, cap) for device, room in budgets.items() if device in devices}
    return {**budgets, **caps}


def fastest_first(outline: Outline, budgets: Budgets, rates: Rates) -> dict[DeviceId, int | None]:
    """Return ``budgets`` of which accelerators with slower memories have no more than the faster ones leave over.

    Each is to have room for one layer more: where one ends, no layer fits to the byte.
    """
    left, largest = outline.skeleton.bytes, max((layer.bytes for layer in outline.layers), default=0)
    limited = dict(budgets)
    for device in sorted(accelerators(budgets), key=lambda device: -rates.device_of(device)):
        room = budgets[device]
        limited[device] = min(left if room is None else room, left + largest if left else 0)
        left = 0 if room is None else max(0, left - max(0, room - largest))
    return limited
