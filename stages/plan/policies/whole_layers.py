"""The policies that fill device after device with whole layers, in the order of execution.

``sequential`` fills each device before it goes on to the next. ``balanced`` does so under a cap: filling in order under
a cap reaches furthest of all ways to cut the model into consecutive stretches, so the smallest cap that holds as much
gives the smallest possible maximum, also where layers differ in size. (It is the linear partition problem, solved by
bisection on its answer.) ``balanced_low_0`` leaves the first accelerator as free as it can be: room on it serves what
grows during generation, the logits and a cache.

The reserve for what is streamed depends on what is offloaded, and what is offloaded on the reserve. So the filling
starts with no reserve, and raises it to the largest streamed layer until nothing changes. Reserves only grow and the
devices only hold less, so this ends, and what stands at the end is the most that can be held: any placement that
respects its own reserve fits into every step on the way. What a mixture's experts need is kept free in the same way:
slots for those of a token, or for two or one where more are too many.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from offstage.stages.machine.rates import Rates
from offstage.stages.plan.expert_slots import LEAST, ROOMY, roomy_slots
from offstage.stages.plan.layout import lay_out
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.placement import Budgets, Homes, Placement, budgeted_accelerators, held_bytes, main_device
from offstage.stages.units import CPU, DeviceId, in_tier_order

_Filling = Callable[[Outline, Budgets], Homes]
"""How a policy fills devices, reserves aside: it may hold on each device at most what the budgets say."""


def sequential(outline: Outline, budgets: Budgets) -> Placement:
    """Return the placement that fills each device before it goes on to the next, and never goes back."""
    return _place(outline, budgets, fill)


def balanced(outline: Outline, budgets: Budgets) -> Placement:
    """Return the placement in order of execution whose most loaded accelerator has the least load possible.

    The accelerators hold as much as under ``sequential``: evenness never costs a layer its place.
    """
    return _place(outline, budgets, _evenly)


def balanced_low_0(outline: Outline, budgets: Budgets) -> Placement:
    """Return the placement with the least on the first accelerator, and what is left balanced over the others."""
    return _place(outline, budgets, _evenly_but_first)


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
    accelerators = _accelerators(budgets)
    if len(accelerators) < 2:
        return fill(outline, budgets)
    return fill(outline, _limit(outline, _limit(outline, budgets, accelerators[:1]), accelerators[1:]))


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
    filled = zip(outline.layers, _layer_devices(outline, budgets), strict=True)
    return sum(layer.bytes for layer, device in filled if isinstance(device, int))


def _capped(budgets: Budgets, devices: Collection[DeviceId], cap: int) -> dict[DeviceId, int | None]:
    caps = {device: cap if room is None else min(room, cap) for device, room in budgets.items() if device in devices}
    return {**budgets, **caps}


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One placement, the reserves that were kept free for it, and whether budgets hold them.

    It ``leads`` where its main device is the first that it names, so that its map reads back to the same.
    """

    placement: Placement
    kept: Mapping[DeviceId, int]
    within: bool
    leads: bool

    @property
    def sound(self) -> bool:
        """Whether it can be used as it stands."""
        return self.within and self.leads


def fill(outline: Outline, budgets: Budgets) -> dict[str, DeviceId]:
    """Return the homes that filling device after device gives, layer by layer in the order of execution.

    A device that can't take the next layer is closed. The last device takes what is left, whatever its budget:
    ``checks.require_fit`` refuses that.
    """
    devices = _layer_devices(outline, budgets)
    return {name: device for layer, device in zip(outline.layers, devices, strict=True) for name in layer.owned}


def _layer_devices(outline: Outline, budgets: Budgets) -> list[DeviceId]:
    """Return the device of each layer under ``fill``; one without any bytes goes with the next."""
    device_of: list[DeviceId] = []
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
        device_of += [device] * waiting
        waiting = 0
    return device_of + [device if device_of else CPU] * waiting


def _place(outline: Outline, budgets: Budgets, filling: _Filling) -> Placement:
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


def _best(outline: Outline, budgets: Budgets, filling: _Filling, *, slots: int) -> Placement:
    """Return the placement that holds most on the accelerators, then on the host, with its reserves kept free.

    Accelerators with a budget are tried as the main device; those before it then hold nothing, so that it is the first
    of the map. After one that will do, others of the same budget hold no more, and where one holds something it is more
    than where none is to. Where no accelerator can hold a layer beside the reserve, one of them still computes, and the
    cpu where none can hold even that. If no placement keeps its reserves, the one on the largest main device is
    returned, for ``checks.require_fit`` to refuse where it can't be streamed in less.
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
    computing = [attempt.placement for attempt in attempts[:-1] if attempt.leads] or [attempts[-1].placement]
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
    filling: _Filling,
    *,
    main: DeviceId,
    caps: Mapping[DeviceId, int | None],
    slots: int,
) -> _Attempt:
    """Fill, and raise what is kept free to what the filling needs, until it holds."""
    reserves: dict[DeviceId, int] = {}
    while True:
        free = {
            device: None if room is None else max(0, room - reserves.get(device, 0)) for device, room in caps.items()
        }
        placement = Placement(filling(outline, free), main)
        needed = lay_out(outline, placement).kept_free(slots)
        if all(count <= reserves.get(device, 0) for device, count in needed.items()):
            break
        reserves = {device: max(reserves.get(device, 0), needed.get(device, 0)) for device in {**reserves, **needed}}
    first = main_device(placement.homes)
    if not needed:
        return _Attempt(Placement(placement.homes, first), needed, within=True, leads=True)
    within = all((room := budgets.get(device, 0)) is None or count <= room for device, count in reserves.items())
    return _Attempt(placement, reserves, within=within, leads=first in (main, CPU))
