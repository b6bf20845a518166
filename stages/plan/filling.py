"""Filling devices in order, with room kept for what is streamed.

The reserve depends on what is offloaded, and what is offloaded on the reserve. So the filling starts with no reserve,
and raises it to the largest streamed layer until nothing changes. Reserves only grow and the devices only hold less, so
this ends, and what stands at the end is the most that can be held: any placement that respects its own reserve fits
into every step on the way. What a mixture's experts need is kept free in the same way: slots for those of a token, or
for two or one where more are too many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from offstage.stages.plan.expert_slots import LEAST, ROOMY, roomy_slots
from offstage.stages.plan.layout import lay_out
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.placement import Budgets, Homes, Placement, budgeted_accelerators, held_bytes, main_device
from offstage.stages.units import CPU, DeviceId, in_tier_order

Filling = Callable[[Outline, Budgets], Homes]
"""How a policy fills devices, reserves aside: it may hold on each device at most what the budgets say."""


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One placement, the reserves that were kept free for it, and whether it can be used as it stands."""

    placement: Placement
    kept: Mapping[DeviceId, int]
    sound: bool


def fill(outline: Outline, budgets: Budgets) -> dict[str, DeviceId]:
    """Return the homes that filling device after device gives, layer by layer in the order of execution.

    A device that can't take the next layer is closed. The last device takes what is left, whatever its budget:
    ``checks.require_fit`` refuses that.
    """
    devices = layer_devices(outline, budgets)
    return {name: device for layer, device in zip(outline.layers, devices, strict=True) for name in layer.owned}


def layer_devices(outline: Outline, budgets: Budgets) -> list[DeviceId]:
    """Return the device of each layer under ``fill``; one without any bytes goes with the next."""
    found: list[DeviceId] = []
    waiting = 0
    devices = iter(in_tier_order(budgets))
    device = next(devices)
    free = budgets[device]
    for layer in outline.layers:
        waiting += 1
        if not layer.bytes:
            continue
        while free is not None and layer.bytes > free:
            following = next(devices, None)
            device, free = (device, None) if following is None else (following, budgets[following])
        free = None if free is None else free - layer.bytes
        found += [device] * waiting
        waiting = 0
    return found + [device if found else CPU] * waiting


def place(outline: Outline, budgets: Budgets, filling: Filling) -> Placement:
    """Return the placement that ``filling`` leads to, or that of plain filling where this holds more.

    (A tied tensor of two no-split layers is streamed to one of them; where a filling parts the two, it takes a reserve
    that another doesn't.)
    """
    for slots in dict.fromkeys((roomy_slots(outline), ROOMY, LEAST)) if outline.experts else (LEAST,):
        placements = [_best(outline, budgets, way, slots=slots) for way in dict.fromkeys((filling, fill))]
        fitting = [placed for placed in placements if lay_out(outline, placed, budgets).shortage(slots=slots) is None]
        if fitting:
            break
    return max(fitting or placements, key=lambda placed: held_bytes(outline, placed.homes))


def _best(outline: Outline, budgets: Budgets, filling: Filling, *, slots: int) -> Placement:
    """Return the placement that holds most on the accelerators, then on the host, with its reserves kept free.

    Accelerators with a budget are tried as the main device; those before it then hold nothing, so that it is the first
    of the map. After one that will do, others of the same budget hold no more, and where one holds something it is more
    than where none is to. Where no accelerator can hold a layer beside the reserve, one of them still computes, and the
    cpu where none can hold even that. If no placement keeps its reserves, the one on the largest main device is
    returned, for ``checks.require_fit`` to refuse.
    """
    attempts: list[_Attempt] = []
    leading: set[int | None] = set()
    for main, caps in _candidates(budgets):
        if leading and (budgets.get(main) in leading or not budgeted_accelerators(caps)):
            continue
        attempts.append(_settle(outline, budgets, filling, main=main, caps=caps, slots=slots))
        if attempts[-1].sound and not attempts[-1].kept:
            break
        if attempts[-1].sound and held_bytes(outline, attempts[-1].placement.homes)[0]:
            leading.add(budgets.get(main))
    sound = [attempt.placement for attempt in attempts if attempt.sound]
    if sound:
        return max(sound, key=lambda placement: held_bytes(outline, placement.homes))
    computing = [attempt.placement for attempt in attempts[:-1]] or [attempts[-1].placement]
    return max(computing, key=lambda placement: budgets.get(placement.main, 0) or 0)


def _candidates(budgets: Budgets) -> Iterator[tuple[DeviceId, dict[DeviceId, int | None]]]:
    """Yield each device that can be the main one, with the budgets that weights may then use.

    Of accelerators with one budget that only compute, the first does for all.
    """
    accelerators = budgeted_accelerators(budgets)
    for index, main in enumerate(accelerators):
        yield main, {**budgets, **dict.fromkeys(accelerators[:index], 0)}
    for main in sorted({budgets[main]: main for main in reversed(accelerators)}.values()):
        yield main, {**budgets, **dict.fromkeys(accelerators, 0)}
    yield CPU, {CPU: 0, **budgets, **dict.fromkeys(accelerators, 0)}


def _settle(
    outline: Outline,
    budgets: Budgets,
    filling: Filling,
    *,
    main: DeviceId,
    caps: Mapping[DeviceId, int | None],
    slots: int,
) -> _Attempt:
    """Fill, and raise what is kept free to what the filling needs, until it holds."""
    kept: dict[DeviceId, int] = {}
    while True:
        free = {device: None if room is None else max(0, room - kept.get(device, 0)) for device, room in caps.items()}
        placement = Placement(filling(outline, free), main)
        needed = lay_out(outline, placement).kept_free(slots)
        if all(count <= kept.get(device, 0) for device, count in needed.items()):
            break
        kept = {device: max(kept.get(device, 0), needed.get(device, 0)) for device in {**kept, **needed}}
    first = main_device(placement.homes)
    if not needed:
        return _Attempt(Placement(placement.homes, first), needed, sound=True)
    within = all((room := budgets.get(device, 0)) is None or count <= room for device, count in kept.items())
    return _Attempt(placement, kept, sound=within and first in (main, CPU))
