"""Layers that compute on the host, where their weights rest: ``execution: fastest``.

What the accelerators can't hold comes over their links, for every token. A layer that rests on the host can compute
there instead: its weights are read at the rate of the host's memory, the activations cross, and the links have less to
bring. They go on bringing other layers meanwhile, as far as reserves have room, so a token is the soonest where that
takes about as long as computing does, the host's layers and the accelerators' one after another. How many layers that
is, is found by trying: those on the host are set aside, ``optimal`` places the others in what is left of the budgets,
and the cost model says what both come to. Where it makes no difference fewer are better: with none the plan is that of
``exact``.

They are from all over the order of execution, so that what the links bring meanwhile is little at a time and finds room
in the reserve. Those come first of which a token reads the least for the memory that they take: tables, of which it
looks up a row, then a mixture's layers, of which it uses some experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from offstage.stages.machine.rates import Rates
from offstage.stages.plan.expert_slots import SINGLE
from offstage.stages.plan.layout import lay_out
from offstage.stages.plan.outline import Layer, Outline
from offstage.stages.plan.placement import Budgets, Placement
from offstage.stages.plan.policies.chosen_tensors import GOLDEN, turns
from offstage.stages.plan.policies.optimal import Search
from offstage.stages.plan.policies.partly_streamed import partners
from offstage.stages.plan.token_time import crossing_seconds
from offstage.stages.plan.traffic import PLAIN_STEP, Step, forecast
from offstage.stages.units import CPU

_FEW = 4
"""A range of no more numbers is tried whole: of five and more the golden section gives two different ones."""
ALIKE = 1.02
"""Predicted times that are no further apart are alike: fewer layers on the host are worth that."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """Layers that lie together since they share tensors, mostly one: their names, and all tensors' that they have.

    They take so many ``bytes``, of which a token reads ``read``.
    """

    layers: tuple[str, ...]
    tensors: frozenset[str]
    bytes: int
    read: float


def with_host_layers(outline: Outline, budgets: Budgets, rates: Rates, *, step: Step = PLAIN_STEP) -> Placement:
    """Return the placement of the fewest seconds a token of those of which some layers may compute on the host.

    Between layers that compute elsewhere the output of one goes over the link. Of the members of a ``step`` each
    computes that for itself.
    """
    search = Search(rates, step)
    exact = search.optimal(outline, budgets)
    if exact.main == CPU or CPU not in exact.homes.values():
        return exact
    worth = 2 * crossing_seconds(step.output_bytes, rates) * rates.slowest_link
    units = _units(outline, budgets, worth)

    @cache
    def placed(count: int) -> Placement:
        return _placed(outline, budgets, search, units[:count]) if count else exact

    @cache
    def seconds(count: int) -> float:
        one = placed(count)
        layout = lay_out(outline, one, budgets)
        is_short = one.main == CPU or layout.shortage(tight=True) is not None
        return math.inf if is_short else forecast(layout, step, rates).seconds

    return placed(_fewest(len(units), seconds))


def _fewest(most: int, seconds: Callable[[int], float]) -> int:
    """Return the number from 0 to ``most`` of the least ``seconds``, or a smaller one that is as good.

    They fall up to some number, and rise from there. It is a golden-section search: one number of each cut was tried
    before, or nearly.
    """
    first, last, tried = 0, most, {0}
    while last - first > _FEW:
        low, high = (first + round(share * (last - first)) for share in (1 - GOLDEN, GOLDEN))
        tried |= {low, high}
        if seconds(low) <= seconds(high):
            last = high
        else:
            first = low
    tried |= set(range(first, last + 1))
    least = min(map(seconds, tried))
    return min(count for count in tried if seconds(count) <= ALIKE * least)


def _placed(outline: Outline, budgets: Budgets, search: Search, units: Sequence[_Unit]) -> Placement:
    """Return the placement of which ``units`` compute on the host, and the other layers lie as ``search`` has them."""
    tensors = frozenset[str]().union(*(unit.tensors for unit in units))
    room = budgets.get(CPU, 0)
    left = room if room is None else room - sum(unit.bytes for unit in units)
    rest = search.optimal(outline.without(tensors), {**budgets, CPU: left})
    homes = {**rest.homes, **dict.fromkeys(map(outline.skeleton.leader, tensors), CPU)}
    computes = {layer: CPU for unit in units for layer in unit.layers}
    return replace(rest, homes=homes, computes={**rest.computes, **computes})


def _units(outline: Outline, budgets: Budgets, worth: float) -> list[_Unit]:
    """Return what can compute on the host, as far as its budget goes, in the order in which it is tried.

    What has no more bytes than are ``worth`` the way of the activations isn't among it, nor what rests packed.
    """
    units = [unit for unit in _together(outline) if unit.bytes > worth and not unit.tensors & outline.packed.keys()]
    even = turns(len(units))
    order = sorted(range(len(units)), key=lambda place: (units[place].read / units[place].bytes, even[place]))
    chosen, room = [], budgets.get(CPU, 0)
    for unit in map(units.__getitem__, order):
        if room is None or unit.bytes <= room:
            chosen.append(unit)
            room = None if room is None else room - unit.bytes
    return chosen


def _together(outline: Outline) -> list[_Unit]:
    """Return all layers in the order of execution, those that share tensors as one, where the last of them is."""
    groups: dict[str, list[Layer]] = {}
    for layer, first in zip(outline.layers, partners(outline, outline.layers).values(), strict=True):
        groups[first] = [*groups.pop(first, ()), layer]
    return [_unit(outline, layers) for layers in groups.values()]


def _unit(outline: Outline, layers: Sequence[Layer]) -> _Unit:
    tensors = [name for layer in layers for name in layer.tensors]
    return _Unit(
        layers=tuple(layer.name for layer in layers),
        tensors=frozenset(tensors),
        bytes=sum(outline.sizes[leader] for leader in set(map(outline.skeleton.leader, tensors))),
        read=sum(
            outline.sizes[name] * SINGLE.share(outline.routed.get(name))
            for name in tensors
            if name not in outline.lookups
        ),
    )
