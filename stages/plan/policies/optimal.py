"""``optimal``: the placement of the fewest predicted seconds a token, of all that are tried.

What is tried are the whole layers of other policies, and the parts of layers of ``partly_streamed``. Where not all of a
mixture fits, what every token needs is placed first, as any model is, and its experts wait below (``slotted_mixture``).
Accelerators can unpack what comes to them packed, and layers can compute on the host, where that is allowed
(``host_layers``). What rests packed on disk can rest so on the host too: it takes less of the budget there than as it
is used, comes from memory in place of storage, and is unpacked for each use. What it takes is lost to what lies there
as it is used, or to slots for experts, so some shares of the room are tried. One forecast weighs them all: that which
the plan prints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from offstage.stages.machine.rates import Rates
from offstage.stages.plan.expert_slots import roomy_slots
from offstage.stages.plan.layout import Layout, lay_out
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.placement import Budgets, Placement, budgeted_accelerators, held_bytes
from offstage.stages.plan.policies.chosen_tensors import below, fitting, total_bytes
from offstage.stages.plan.policies.partly_streamed import PartlyStreamed
from offstage.stages.plan.policies.slotted_mixture import SlottedMixture
from offstage.stages.plan.policies.whole_layers import balanced, fastest_first, sequential
from offstage.stages.plan.traffic import PLAIN_STEP, Step, forecast
from offstage.stages.units import CPU, DISK

_SHARE = 2
"""What unpacking takes of an accelerator's budget is one part of so many at the most: weights need room."""
_FEW = 3
"""So many of the soonest placements of what every token needs are tried with a mixture's experts below them."""
_SHARES = 8
"""How many shares of the host's room are tried for what rests packed."""


@dataclass(frozen=True, slots=True)
class Search:
    """What placements are compared by, the seconds of a ``step`` at some ``rates``, and what ``optimal`` may try.

    At most so many ``links`` stream; null: those of all accelerators. If ``by_blocks``, the widest weights come by
    blocks of rows where that is possible, however much the budget can hold: products with them take less then.
    """

    rates: Rates = field(default_factory=Rates)
    step: Step = PLAIN_STEP
    links: int | None = None
    by_blocks: bool = False

    def optimal(self, outline: Outline, budgets: Budgets) -> Placement:
        """Return the placement of the fewest seconds a token. Where nothing must be streamed it is the balanced one.

        Among placements that are equally fast (the host's memory may bound both) the one with the least to stream.
        """

        def tried(rooms: Budgets, unpacks: bool) -> list[Placement]:
            as_used = list(self._as_used(outline, rooms))
            return [*as_used, *self._packed(outline, rooms, as_used, unpacks=unpacks)]

        return replace(self.unpacking_too(outline, budgets, tried), least_blocks=self.by_blocks)

    def unpacking_too(
        self, outline: Outline, budgets: Budgets, tried: Callable[[Budgets, bool], Iterable[Placement]]
    ) -> Placement:
        """Return the soonest of what is ``tried``, accelerators unpacking what comes packed where that is sooner.

        It takes a little of an accelerator's memory, and so of its budget: all is tried anew in what is left, knowing
        that links bring packed bytes then, and so that weights may better wait packed on the host.
        """
        plain, room = self.soonest(outline, budgets, tried(budgets, False)), outline.device_unpacking_bytes
        able = [device for device in budgeted_accelerators(budgets) if room and _is_small(room, budgets[device])]
        if not able:
            return plain
        waiting = frozenset(name for name, home in plain.homes.items() if home == CPU)
        needed = lay_out(outline, replace(plain, packed=waiting)).unpacking_rooms
        placements = [plain]
        for devices in dict.fromkeys((frozenset(able).intersection(needed), frozenset(able))):
            left = {one: size if size is None or one not in devices else size - room for one, size in budgets.items()}
            again = (plain, *tried(left, True)) if devices else ()
            placements += [replace(one, unpacks=devices) for one in again]
        return self.soonest(outline, budgets, placements)

    def soonest(self, outline: Outline, budgets: Budgets, placements: Iterable[Placement]) -> Placement:
        """Return the first of those that cost the least of the ``placements`` that ``budgets`` can hold, if any can."""
        return self._ranked(outline, budgets, placements)[0]

    def _ranked(self, outline: Outline, budgets: Budgets, placements: Iterable[Placement]) -> Sequence[Placement]:
        """Return those of ``placements`` that fit, the soonest first; as they came where none does."""
        layouts = [lay_out(outline, placement, budgets) for placement in placements]
        fit = [layout for layout in layouts if layout.shortage(tight=True) is None]
        if len(fit) > 1:
            fit.sort(key=self._cost)
        return [layout.placement for layout in fit or layouts]

    def _cost(self, layout: Layout) -> tuple[float, float, int, int]:
        """Return what makes a placement worse: seconds a token, bytes streamed, those read, those not accelerated."""
        expected = forecast(layout, self.step, self.rates)
        accelerated, *_ = held_bytes(layout.outline, layout.placement.homes)
        return expected.seconds, expected.brought.bytes, expected.brought.at_rest.get(DISK, 0), -accelerated

    def _as_used(self, outline: Outline, budgets: Budgets) -> Iterator[Placement]:
        """Yield placements of which all that lies on the host lies there as it is used."""
        whole = balanced(outline, budgets)
        if not lay_out(outline, whole).kept_free():
            yield from self._resident(outline, budgets, whole)
            return
        streamed = self._streamed(outline, budgets)
        if streamed and (self.by_blocks or outline.routed):
            yield from streamed
            return
        filled = sequential(outline, budgets)
        yield from (filled, *streamed, whole)
        if not streamed and all(lay_out(outline, one, budgets).shortage() for one in (filled, whole)):
            parts = PartlyStreamed(outline, budgets, self.rates, self.links)
            yield from (*parts.part_by_part(), *parts.by_blocks())

    def _streamed(self, outline: Outline, budgets: Budgets) -> Sequence[Placement]:
        """Return placements of which experts have slots, or parts of layers stream, if the budgets hold any."""
        parts = PartlyStreamed(outline, budgets, self.rates, self.links)
        if placements := [*self._mixture(outline, budgets, parts), *(parts.by_blocks() if self.by_blocks else ())]:
            return placements
        return () if outline.experts else list(parts.placements())

    def _resident(self, outline: Outline, budgets: Budgets, even: Placement) -> Iterator[Placement]:
        """Yield ``even``, of which nothing is streamed, and where memories are unlike what fills the fastest first."""
        yield even
        if self.rates.apart:
            swift = sequential(outline, fastest_first(outline, budgets, self.rates))
            if not lay_out(outline, swift).kept_free():
                yield swift

    def _mixture(self, outline: Outline, budgets: Budgets, parts: PartlyStreamed) -> Iterator[Placement]:
        """Yield placements of a mixture: all but tables resident, or all experts below, with slots where they compute.

        That is on accelerators, or where these have no room, on the host.
        """
        if not outline.routed:
            return
        if not parts.accelerators and (resident := list(parts.resident())):
            yield from resident
            return
        for computing in (parts.accelerators, [CPU]) if parts.accelerators else ([CPU],):
            mixture = SlottedMixture(outline, budgets, computing, self._dense(outline.dense))
            if placements := mixture.placements():
                yield from placements
                return

    def _dense(self, dense: Outline) -> Callable[[Budgets], Sequence[Placement]]:
        """Return what places all that isn't experts: in some ways, of which experts may better go with a later one."""
        return lambda budgets: self._ranked(dense, budgets, self._as_used(dense, budgets))[:_FEW]

    def _packed(
        self, outline: Outline, budgets: Budgets, as_used: Sequence[Placement], *, unpacks: bool
    ) -> Iterator[Placement]:
        """Yield placements of which a part of the host's budget holds packed what would be on disk else."""
        if not budgets.get(CPU) or self.by_blocks:
            return
        if outline.experts:
            for placement in as_used:
                yield from _experts_packed(outline, placement, budgets)
        elif unpacks or any(_rests_packed(outline, placement) for placement in as_used):
            yield from self._dense_packed(outline, budgets)

    def _dense_packed(self, outline: Outline, budgets: Budgets) -> Iterator[Placement]:
        """Yield placements by some shares of the host's budget, the rest holding packed what is on disk then."""
        budget, least = budgets.get(CPU) or 0, _least_as_used(outline, budgets)
        for share in range(_SHARES):
            rooms = {**budgets, CPU: min(budget, least + max(0, budget - least) * share // _SHARES)}
            streamed = share and self._streamed(outline, rooms)  # whole layers too, which takes long, but once
            for placement in streamed or self._as_used(outline, rooms):
                yield _filled(outline, placement, budget)


def _is_small(room: int, budget: int | None) -> bool:
    return budget is None or room * _SHARE <= budget


def _rests_packed(outline: Outline, placement: Placement) -> bool:
    """Return whether anything on disk rests packed."""
    return any(home == DISK and name in outline.packed for name, home in placement.homes.items())


def _filled(outline: Outline, placement: Placement, budget: int) -> Placement:
    """Return ``placement`` with as much on the host of what is on disk as its ``budget`` holds, packed what can be.

    Where some that rests packed stays on disk, room is left to unpack it as it is read.
    """
    stays = outline.lookups if placement.main == CPU else outline.lookups & outline.packed.keys()
    waiting = {name for name, home in placement.homes.items() if home == DISK} - stays
    layout = lay_out(outline, placement, {CPU: budget})
    free = layout.kept_free().get(CPU, 0)
    for unpacked in (False, True):
        ahead = outline.read_ahead_bytes(waiting, unpacked=unpacked) if placement.main == CPU else 0
        taken = fitting(outline, waiting, layout.left(CPU, {CPU: max(free, ahead)}) or 0, at_rest=True)
        if outline.packed.keys().isdisjoint(waiting - taken):
            break
    return _on_host(placement, taken, packed=taken & outline.packed.keys())


def _experts_packed(outline: Outline, placement: Placement, budgets: Budgets) -> Iterator[Placement]:
    """Yield ``placement`` with some of its experts on the host packed, and as many as then fit as they are used."""
    away = lay_out(outline, placement).offloaded_experts
    names = [name for module in away for name in outline.experts[module].tensors if name in outline.packed]
    if not names:
        return
    stored = replace(placement, homes={**placement.homes, **dict.fromkeys(names, DISK)})
    layout = lay_out(outline, stored, budgets)
    room = layout.left(CPU, layout.kept_free(roomy_slots(outline))) or 0
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
