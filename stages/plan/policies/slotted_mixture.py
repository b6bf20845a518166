"""A mixture of which not all fits: its experts wait below the devices that compute them, and have slots there.

Slots for all experts that a token uses of a layer let these be read at once, and come before anything else that isn't
needed then. What they leave is for what every token needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from offstage.stages.empty_init.skeleton import parent
from offstage.stages.plan.expert_slots import LEAST, pools, roomy_slots
from offstage.stages.plan.layout import lay_out
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.placement import Budgets, Placement, execution_device
from offstage.stages.plan.policies.chosen_tensors import below, fitting, total_bytes
from offstage.stages.units import CPU, DISK, DeviceId


@dataclass(frozen=True, slots=True)
class SlottedMixture:
    """The model of ``outline`` under ``budgets``, computed by the devices ``computing``.

    ``place_dense`` places all but the experts in the budgets that it is given, in some ways.
    """

    outline: Outline
    budgets: Budgets
    computing: Collection[DeviceId]
    place_dense: Callable[[Budgets], Iterable[Placement]]

    def placements(self) -> list[Placement]:
        """Return those with slots for all experts of a token, or else with one, if any fits.

        Beside a single slot as much is left of the bytes that the others would take as there can be, by eighths. Else
        these, which come as soon as there is room for them, would push out weights that every token needs: more budget
        is never to bring more bytes.
        """
        one, slots = _largest_expert(self.outline), roomy_slots(self.outline)
        others = (slots - LEAST) * one
        tried = [(slots, slots * one), *((LEAST, LEAST * one + others * left // 8) for left in range(7, -1, -1))]
        placements = (self._beside(count, left) for count, left in tried)
        return next(filter(None, placements), None) or self._beside(LEAST, LEAST * one, tight=True)

    def _beside(self, slots: int, left: int, *, tight: bool = False) -> list[Placement]:
        """Return the placements with so many ``slots``, and ``left`` bytes that hold nothing else, if any fits.

        The reserve is a layer's; if ``tight``, the least.
        """
        rooms = {
            device: 0 if isinstance(device, int) and CPU in self.computing else room
            for device, room in self.budgets.items()
        }
        free = {**rooms, **{device: _less(rooms.get(device, 0), left) for device in self.computing}}
        placed = (_with_experts_below(self.outline, dense, self.budgets) for dense in self.place_dense(free))
        layouts = [lay_out(self.outline, one, self.budgets) for one in placed if one.main in self.computing]
        return [layout.placement for layout in layouts if layout.shortage(slots=slots, tight=tight) is None]


def _with_experts_below(outline: Outline, dense: Placement, budgets: Budgets) -> Placement:
    """Return the placement ``dense`` of all but the experts with these on the host, as far as it goes, and on disk.

    Those in lists lie where they compute as far as there is room. Where the host computes and has slots, its tables are
    on disk too, but for what all experts in slots leave: a row of a table costs less than the experts that have a slot
    in its place.
    """
    names = [name for layer in outline.layers for name in layer.owned if name in outline.routed]
    away = replace(dense, homes={**dense.homes, **dict.fromkeys(names, DISK)})
    near = _near(outline, away, budgets) if outline.listed else {}
    left = [name for name in names if name not in near]
    room = _less(lay_out(outline, replace(away, homes={**away.homes, **near}), budgets).left(CPU, {}), 0)
    homes = {**dense.homes, **near, **below(outline, left, dense.main, {CPU: room})}
    if outline.experts and dense.main == CPU and room is not None:
        tables = {name for name, home in dense.homes.items() if home == CPU and name in outline.tables}
        spare = room + total_bytes(outline, tables) - total_bytes(outline, left)
        homes |= dict.fromkeys(tables - fitting(outline, tables, spare), DISK)
    return replace(dense, homes=homes)


def _largest_expert(outline: Outline) -> int:
    """Return the bytes of the largest expert, or of a slot for each kind of those that have some."""
    sizes: Counter[str] = Counter()
    for name in outline.listed:
        sizes[outline.skeleton.expert_of[parent(name)]] += outline.sizes[name]
    sharing = pools(outline, dict.fromkeys(outline.experts, CPU)).values()
    return max([*sizes.values(), *(pool.unit_bytes for pool in sharing)])


def _near(outline: Outline, away: Placement, budgets: Budgets) -> dict[str, DeviceId]:
    """Return the experts in lists that the devices hold which compute them, beside what ``away`` has there."""
    layout = lay_out(outline, away, budgets)
    computed: dict[DeviceId, set[str]] = {}
    for layer in outline.layers:
        device = execution_device(outline, layer, away)
        computed.setdefault(device, set()).update(name for name in layer.owned if name in outline.listed)
    near: dict[str, DeviceId] = {}
    for device, names in computed.items():
        room = layout.left(device, layout.kept_free())
        near |= dict.fromkeys(names if room is None else fitting(outline, names, room), device)
    return near


def _less(room: int | None, count: int) -> int | None:
    return None if room is None else max(0, room - count)
