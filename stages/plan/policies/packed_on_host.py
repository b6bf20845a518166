"""What waits on the host packed, as it rests on disk.

It takes less of the budget there than as it is used, comes from memory in place of storage, and is unpacked for each
use. Whether that is faster depends on storage and cores, and what it takes is lost to what lies there as it is used, or
to slots for experts. So some shares of the room are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from offstage.stages.plan.expert_slots import roomy_slots
from offstage.stages.plan.layout import lay_out
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.placement import Budgets, Placement, budgeted_accelerators, resident_bytes
from offstage.stages.plan.policies.chosen_tensors import below, fitting, total_bytes
from offstage.stages.units import CPU, DISK

_SHARES = 8


def stored_packed(outline: Outline, placement: Placement) -> set[str]:
    """Return the tensors that rest packed on disk."""
    return {name for name, home in placement.homes.items() if home == DISK and name in outline.packed}


def dense_packed(
    outline: Outline, budgets: Budgets, place: Callable[[Budgets, bool], Iterable[Placement]]
) -> Iterator[Placement]:
    """Yield what ``place`` makes of some shares of the host's budget, the rest holding packed what is on disk then.

    It is told whether to fill devices with whole layers too, which takes long: where as little as can be lies as it is
    used.
    """
    budget, least = budgets.get(CPU) or 0, _least_as_used(outline, budgets)
    for share in range(_SHARES):
        room = min(budget, least + max(0, budget - least) * share // _SHARES)
        for placement in place({**budgets, CPU: room}, not share):
            yield _filled(outline, placement, budget)


def _filled(outline: Outline, placement: Placement, budget: int) -> Placement:
    """Return ``placement`` with as much on the host of what is on disk as its ``budget`` holds, packed what can be.

    Where some that rests packed stays on disk, room is left to unpack it as it is read.
    """
    stays = outline.lookups if placement.main == CPU else outline.lookups & outline.packed.keys()
    waiting = {name for name, home in placement.homes.items() if home == DISK} - stays
    held = resident_bytes(outline, placement.homes).get(CPU, 0)
    kept = lay_out(outline, placement).kept_free().get(CPU, 0)
    for unpacked in (False, True):
        ahead = outline.read_ahead_bytes(waiting, unpacked=unpacked) if placement.main == CPU else 0
        taken = fitting(outline, waiting, budget - held - max(kept, ahead), at_rest=True)
        if outline.packed.keys().isdisjoint(waiting - taken):
            break
    return _on_host(placement, taken, packed=taken & outline.packed.keys())


def experts_packed(outline: Outline, placement: Placement, budgets: Budgets) -> Iterator[Placement]:
    """Yield ``placement`` with some of its experts on the host packed, and as many as then fit as they are used."""
    away = lay_out(outline, placement).offloaded_experts
    names = [name for module in away for name in outline.experts[module].tensors if name in outline.packed]
    if not names:
        return
    stored = replace(placement, homes={**placement.homes, **dict.fromkeys(names, DISK)})
    held = resident_bytes(outline, stored.homes).get(CPU, 0)
    kept = lay_out(outline, stored).kept_free(roomy_slots(outline)).get(CPU, 0)
    room = (budgets.get(CPU) or 0) - held - kept
    for share in range(1, _SHARES + 1):
        packed = fitting(outline, names, room * share // _SHARES, at_rest=True)
        if packed:
            taken = sum(outline.rest_sizes[name] for name in packed)
            left = [name for name in names if name not in packed]
            used = below(outline, left, placement.main, {CPU: max(0, room - taken)})
            yield _on_host(replace(stored, homes={**stored.homes, **used}), packed, packed=packed)


def _on_host(placement: Placement, names: set[str], *, packed: set[str]) -> Placement:
    return replace(placement, homes={**placement.homes, **dict.fromkeys(names, CPU)}, packed=frozenset(packed))


def _least_as_used(outline: Outline, budgets: Budgets) -> int:
    """Return what the host holds, where it computes, if all that rests packed is streamed, and no more than that."""
    if budgeted_accelerators(budgets):
        return 0
    leaders = {name for layer in outline.layers for name in layer.owned}
    stays = leaders - outline.packed.keys() - outline.tables
    placement = Placement({name: CPU if name in stays else DISK for name in leaders}, CPU)
    return total_bytes(outline, stays) + lay_out(outline, placement).kept_free().get(CPU, 0)
