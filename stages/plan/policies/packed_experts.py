"""How many of a mixture's experts wait on the host packed, as they rest on disk.

They take less there than as they are used, and come from memory in place of storage; what they take is lost to slots,
where the host computes, or to experts that wait as they are used. Some shares of the room are tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from offstage.stages.machine.rates import Rates
from offstage.stages.plan.expert_slots import roomy_slots
from offstage.stages.plan.layout import lay_out
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.placement import Budgets, Placement, resident_bytes
from offstage.stages.plan.policies.even_choice import below, fitting
from offstage.stages.plan.traffic import Step, forecast
from offstage.stages.units import CPU, DISK

_SHARES = 8


def with_experts_packed(
    outline: Outline, placement: Placement, budgets: Budgets, rates: Rates, step: Step
) -> Placement:
    """Return ``placement``, or the fastest of those of which some of its experts wait on the host packed."""
    names = [
        name
        for module in lay_out(outline, placement).offloaded_experts
        for name in outline.experts[module].tensors
        if name in outline.packed
    ]
    if not names or not budgets.get(CPU):
        return placement
    found = [placement, *_packed(outline, placement, budgets, names)]
    return min(found, key=lambda one: forecast(lay_out(outline, one, budgets), step, rates).seconds)


def _packed(outline: Outline, placement: Placement, budgets: Budgets, names: Sequence[str]) -> Iterator[Placement]:
    away = replace(placement, homes={**placement.homes, **dict.fromkeys(names, DISK)})
    held, kept = (
        resident_bytes(outline, away.homes).get(CPU, 0),
        lay_out(outline, away).kept_free(roomy_slots(outline)).get(CPU, 0),
    )
    room = (budgets.get(CPU) or 0) - held - kept
    for share in range(1, _SHARES + 1):
        packed = fitting(outline, names, room * share // _SHARES, at_rest=True)
        left = [name for name in names if name not in packed]
        taken = sum(outline.rest_sizes[name] for name in packed)
        used = below(outline, left, placement.main, {CPU: max(0, room - taken)})
        homes = {**away.homes, **used, **dict.fromkeys(packed, CPU)}
        one = replace(placement, homes=homes, packed=frozenset(packed))
        if packed and lay_out(outline, one, budgets).shortage(tight=True) is None:
            yield one
