"""Whether accelerators unpack what comes to them packed: where that is sooner than what the host unpacks.

It takes a little of an accelerator's memory, and so of its budget: the placement is made anew in what is left, knowing
that links bring packed bytes, and so that weights may better wait packed on the host. The cost model says which of both
is sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from offstage.stages.plan.layout import lay_out
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.placement import Budgets, Placement
from offstage.stages.units import CPU, DeviceId

_SHARE = 2
"""What unpacking takes of an accelerator's budget is one part of so many at the most: weights need room."""


def with_unpacking(
    outline: Outline,
    budgets: Budgets,
    place: Callable[[Outline, Budgets], Placement],
    seconds: Callable[[Outline, Placement, Budgets], float],
) -> Placement:
    """Return what ``place`` makes of the model and the budgets, accelerators unpacking where that takes fewer
    ``seconds``.
    """
    plain = place(outline, budgets)
    at_rest = replace(plain, packed=frozenset(name for name, home in plain.homes.items() if home == CPU))
    rooms = {
        device: room
        for device, room in lay_out(outline, at_rest).unpacking_rooms.items()
        if _is_small(room, budgets.get(device, 0))
    }
    if not rooms:
        return plain
    capable, left = replace(outline, unpacks=frozenset(rooms)), _less(budgets, rooms)
    found = [
        replace(one, unpacks=capable.unpacks)
        for one in (plain, place(capable, left))
        if lay_out(outline, one, left).shortage(tight=True) is None
    ]
    return min(
        [plain, *found],
        key=lambda one: seconds(capable, one, left) if one.unpacks else seconds(outline, one, budgets),
    )


def _is_small(room: int, budget: int | None) -> bool:
    return budget is None or room * _SHARE <= budget


def _less(budgets: Budgets, rooms: Mapping[DeviceId, int]) -> dict[DeviceId, int | None]:
    return {device: room if room is None else room - rooms.get(device, 0) for device, room in budgets.items()}
