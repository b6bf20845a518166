"""The policies that fill device after device with whole layers, in the order of execution.

``sequential`` fills each device before it goes on to the next. ``balanced`` does so under a cap: filling in order under
a cap reaches furthest of all ways to cut the model into consecutive stretches, so the smallest cap that holds as much
gives the smallest possible maximum, also where layers differ in size. (It is the linear partition problem, solved by
bisection on its answer.) ``balanced_low_0`` leaves the first accelerator as free as it can be: room on it serves what
grows during generation, the logits and a cache.
"""

from __future__ import annotations

from collections.abc import Collection

from offstage.stages.machine.rates import Rates
from offstage.stages.plan.filling import fill, layer_devices, place
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.placement import Budgets, Homes, Placement
from offstage.stages.units import DeviceId, in_tier_order


def sequential(outline: Outline, budgets: Budgets) -> Placement:
    """Return the placement that fills each device before it goes on to the next, and never goes back."""
    return place(outline, budgets, fill)


def balanced(outline: Outline, budgets: Budgets) -> Placement:
    """Return the placement in order of execution whose most loaded accelerator has the least load possible.

    The accelerators hold as much as under ``sequential``: evenness never costs a layer its place.
    """
    return place(outline, budgets, _evenly)


def balanced_low_0(outline: Outline, budgets: Budgets) -> Placement:
    """Return the placement with the least on the first accelerator, and what is left balanced over the others."""
    return place(outline, budgets, _evenly_but_first)


def fastest_first(outline: Outline, budgets: Budgets, rates: Rates) -> dict[DeviceId, int | None]:
    """Return ``budgets`` of which accelerators with slower memories have no more than the faster ones leave over.

    Each is to have room for one layer more: where one ends, no layer fits to the byte.
    """
    left, largest = outline.skeleton.bytes, max((layer.bytes for layer in outline.layers), default=0)
    limited = dict(budgets)
    for device in sorted(_accelerators(budgets), key=lambda device: -rates.device_of(device)):
        room = budgets[device]
        limited[device] = min(left if room is None else room, left + largest if left else 0)
        left = 0 if room is None else max(0, left - max(0, room - largest))
    return limited


def _evenly(outline: Outline, budgets: Budgets) -> Homes:
    return fill(outline, _limit(outline, budgets, _accelerators(budgets)))


def _evenly_but_first(outline: Outline, budgets: Budgets) -> Homes:
    found = _accelerators(budgets)
    if len(found) < 2:
        return fill(outline, budgets)
    return fill(outline, _limit(outline, _limit(outline, budgets, found[:1]), found[1:]))


def _accelerators(budgets: Budgets) -> list[DeviceId]:
    return [device for device in in_tier_order(budgets) if isinstance(device, int)]


def _limit(outline: Outline, budgets: Budgets, devices: Collection[DeviceId]) -> Budgets:
    """Return ``budgets`` with the smallest cap on ``devices`` under which all accelerators hold as much as without."""
    if not devices:
        return budgets
    target, low, high = _accelerated(outline, budgets), 0, outline.skeleton.bytes
    while low < high:
        middle = (low + high) // 2
        holds = _accelerated(outline, _capped(budgets, devices, middle)) >= target
        low, high = (low, middle) if holds else (middle + 1, high)
    return _capped(budgets, devices, low)


def _accelerated(outline: Outline, budgets: Budgets) -> int:
    """Return the bytes that accelerators hold where devices are filled in order."""
    filled = zip(outline.layers, layer_devices(outline, budgets), strict=True)
    return sum(layer.bytes for layer, device in filled if isinstance(device, int))


def _capped(budgets: Budgets, devices: Collection[DeviceId], cap: int) -> dict[DeviceId, int | None]:
    caps = {device: cap if room is None else min(room, cap) for device, room in budgets.items() if device in devices}
    return {**budgets, **caps}
