"""``optimal``: the fewest predicted seconds a token. That is the least streamed, evenly over the order of execution.

A no-split layer must compute on one device; its tensors needn't wait on one. So part of each layer stays and the rest
is streamed, which saves twice: the budget is filled to within a tensor, and the reserve shrinks from the largest layer
to the largest streamed part of one. The same part of every layer is streamed, so that storage is never idle while
resident layers compute: a token then takes the longer of reading and computing, and not their sum.

For a reserve of r bytes each layer may stream at most r. Which of its tensors stream is a subset-sum problem, small
enough (a dozen tensors, few distinct layers) to be solved exactly. The smallest r whose remaining tensors fit beside
it leaves the fewest bytes to stream. Several accelerators each have their share of the layers, hold parts of those and
stream the rest over links of their own (``link_shares``); or one streams, and the others hold whole layers. Where the
budget can't hold a layer's worth at all, everything streams, part by part.

Of a mixture's experts a token uses a few, so a byte of an expert is worth a fraction of a byte that every token needs.
Where not all fits, the model without its experts is placed first, as any model is; the experts all wait below, evenly,
and what is left of the budgets is slots for those that tokens are routed to. A few layers with all of their experts
would be slots that nothing but these layers can use. Experts that are modules in a list have no slots: what is left
holds some of all layers.

What rests packed on disk can rest so on the host too: it takes less of the budget there, and is unpacked for each use.
Whether that is faster depends on storage and cores. So some shares of the host's budget are tried for what lies there
as it is used, the rest holding packed what would be on disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from offstage.stages.machine.rates import Rates
from offstage.stages.plan.filling import fill
from offstage.stages.plan.layout import Layout, lay_out
from offstage.stages.plan.outline import Layer, Outline
from offstage.stages.plan.placement import Budgets, Placement, budgeted_accelerators, held_bytes, resident_bytes
from offstage.stages.plan.policies.balanced import balanced
from offstage.stages.plan.policies.even_choice import below, fitting, total_bytes
from offstage.stages.plan.policies.expert_placement import SlottedMixture
from offstage.stages.plan.policies.least_streamed import least_streamed
from offstage.stages.plan.policies.link_shares import devices_to_share, evened_bytes, share_layers, wanted_bytes
from offstage.stages.plan.policies.packed_experts import with_experts_packed
from offstage.stages.plan.policies.sequential import sequential
from offstage.stages.plan.policies.spreading import fastest_first
from offstage.stages.plan.policies.wide_weights import with_wide_streamed
from offstage.stages.plan.traffic import PLAIN_STEP, Step, forecast
from offstage.stages.units import CPU, DISK, DeviceId

_EVENED = 3
"""How often layers are shared out anew to several links, by what each was to bring."""
_NO_MATTER = 10**15
"""Bytes a second of a storage that nothing waits for."""
_SHARES = 8
"""How many shares of the host's budget are tried for what lies there as it is used, where some may rest packed."""


@dataclass(frozen=True, slots=True)
class _Terms:
    """What placements are compared by, and what ``optimal`` was asked for."""

    rates: Rates
    links: int | None
    step: Step
    by_blocks: bool


def optimal(
    outline: Outline,
    budgets: Budgets,
    rates: Rates | None = None,
    *,
    links: int | None = None,
    step: Step = PLAIN_STEP,
    by_blocks: bool = False,
) -> Placement:
    """Return the placement of the fewest seconds a token. Where nothing must be streamed it is the balanced one.

    Among placements that are equally fast (the host's memory may bound both) the one with the least to stream. At most
    so many ``links`` stream; null: those of all accelerators. If ``by_blocks``, the widest weights come by blocks of
    rows where that is possible, however much the budget can hold: products with them take less beside it then.
    """
    terms = _Terms(rates or Rates(), links, step, by_blocks)
    placement = _as_used(outline, budgets, terms)
    if by_blocks:
        return replace(placement, least_blocks=True)
    if outline.experts:
        return with_experts_packed(outline, placement, budgets, terms.rates, terms.step)
    if not (_stored_packed(outline, placement) or outline.unpacks) or not budgets.get(CPU):
        return placement
    found = [placement, *_with_packed(outline, budgets, terms)]
    fitting = [layout for one in found if (layout := lay_out(outline, one, budgets)).shortage() is None]
    return _best(fitting, terms) if fitting else placement


def _with_packed(outline: Outline, budgets: Budgets, terms: _Terms) -> Iterator[Placement]:
    """Yield the placements of which a part of the host's budget holds packed what would be on disk else.

    Where accelerators unpack, links have less to bring then: they are shared out as if nothing were read from storage.
    """
    budget, least = budgets.get(CPU) or 0, _beside_packed(outline, budgets)
    terms = replace(terms, rates=replace(terms.rates, storage=_NO_MATTER)) if outline.unpacks else terms
    for share in range(_SHARES):
        room = least + max(0, budget - least) * share // _SHARES
        placement = _as_used(outline, {**budgets, CPU: min(room, budget)}, terms)
        stored = _stored_packed(outline, placement)
        held = resident_bytes(outline, placement.homes).get(CPU, 0)
        kept = lay_out(outline, placement).kept_free().get(CPU, 0)
        ahead = max(0, outline.two_largest(stored - outline.lookups) - kept) if placement.main == CPU else 0
        packed = fitting(outline, stored - outline.lookups, budget - held - kept - ahead, at_rest=True)
        yield replace(placement, homes={**placement.homes, **dict.fromkeys(packed, CPU)}, packed=frozenset(packed))


def _stored_packed(outline: Outline, placement: Placement) -> set[str]:
    return {name for name, home in placement.homes.items() if home == DISK and name in outline.packed}


def _beside_packed(outline: Outline, budgets: Budgets) -> int:
    """Return what the host holds, where it computes, if all that rests packed is streamed, and no more than that."""
    if _computing(budgets)[0] != CPU:
        return 0
    leaders = {name for layer in outline.layers for name in layer.owned}
    stays = {name for name in leaders if name not in outline.packed and name not in outline.tables}
    placement = Placement({name: CPU if name in stays else DISK for name in leaders}, CPU)
    return total_bytes(outline, stays) + lay_out(outline, placement).kept_free().get(CPU, 0)


def _as_used(outline: Outline, budgets: Budgets, terms: _Terms) -> Placement:
    """Return the best placement of which all that lies on the host lies there as it is used."""
    whole = balanced(outline, budgets)
    if not lay_out(outline, whole).kept_free():
        return _resident(outline, budgets, terms, whole)
    mixture = next(_of_mixture(outline, budgets, terms), None) if outline.experts or outline.listed else None
    if mixture is not None:
        return mixture
    found = [sequential(outline, budgets)]
    if not outline.experts:
        found += _partly_resident(outline, budgets, terms)
    found.append(whole)
    if terms.by_blocks:
        found = [*_by_blocks(outline, budgets, terms)] or found
    layouts = [lay_out(outline, placement, budgets) for placement in found]
    if not terms.by_blocks and all(layout.shortage() is not None for layout in layouts):
        tight = [*_part_by_part(outline, budgets, terms), *_by_blocks(outline, budgets, terms)]
        layouts = [lay_out(outline, placement, budgets) for placement in tight] or layouts
    return _best(layouts, terms)


def _resident(outline: Outline, budgets: Budgets, terms: _Terms, even: Placement) -> Placement:
    """Return ``even``, of which nothing is streamed, or where memories are unlike one that fills the fastest first."""
    if not terms.rates.devices:
        return even
    swift = sequential(outline, fastest_first(outline, budgets, terms.rates))
    layout = lay_out(outline, swift, budgets)
    if layout.kept_free() or layout.shortage():
        return even
    return _best([lay_out(outline, even, budgets), layout], terms)


def _of_mixture(outline: Outline, budgets: Budgets, terms: _Terms) -> Iterator[Placement]:
    """Yield the placements of a mixture, the best first.

    Either all but tables is resident, or all experts wait below, with slots where they compute.
    """
    _, accelerators = _computing(budgets)
    if not accelerators:
        (alone,) = _shares(outline, budgets, replace(terms, links=1))
        yield from (
            placement for placement in _split(outline, budgets, alone) if not lay_out(outline, placement).kept_free()
        )
    for computing in (accelerators, [CPU]) if accelerators else ([CPU],):
        mixture = SlottedMixture(outline, budgets, computing, lambda rooms: _as_used(outline.dense, rooms, terms))
        yield from mixture.placements()


def _best(layouts: Sequence[Layout], terms: _Terms) -> Placement:
    """Return the placement of those of ``layouts`` that costs the least, the first of them."""
    return min(layouts, key=lambda layout: _cost(layout, terms)).placement


def _cost(layout: Layout, terms: _Terms) -> tuple[float, float, int, int]:
    """Return what makes a placement worse: seconds a token, bytes streamed, those from disk, bytes not accelerated."""
    expected = forecast(layout, terms.step, terms.rates)
    accelerated, *_ = held_bytes(layout.outline, layout.placement.homes)
    return expected.seconds, expected.brought.bytes, expected.brought.at_rest.get(DISK, 0), -accelerated


def _part_by_part(outline: Outline, budgets: Budgets, terms: _Terms) -> Iterator[Placement]:
    """Yield the placements of which all is streamed to one accelerator or several, if they can hold what is in use."""
    main, _ = _computing(budgets)
    for shares in _shares(outline, budgets, terms):
        names = [name for layer in outline.layers for name in layer.owned if name not in shares.whole]
        homes = {**shares.whole, **below(outline, names, main, budgets)}
        placement = _sharing(outline, Placement(homes, main), shares)
        if lay_out(outline, placement, budgets).shortage(tight=True) is None:
            yield placement


def _by_blocks(outline: Outline, budgets: Budgets, terms: _Terms) -> Iterator[Placement]:
    """Yield the placements on the host of which the widest weights come by blocks of rows, and others partly stay."""
    room = budgets.get(CPU)
    if _computing(budgets)[0] == CPU and room is not None:
        (alone,) = _shares(outline, budgets, replace(terms, links=1))
        yield from with_wide_streamed(
            outline, room, lambda less, wide: _split(outline, {**budgets, CPU: less}, alone, wide=wide)
        )


def _computing(budgets: Budgets) -> tuple[DeviceId, list[DeviceId]]:
    """Return the main device, and the accelerators with a budget."""
    accelerators = budgeted_accelerators(budgets)
    return (accelerators[0] if accelerators else CPU), accelerators


@dataclass(frozen=True, slots=True)
class _Shares:
    """The homes of what accelerators hold as ``whole`` layers, and the layers that others hold ``partly``."""

    whole: Mapping[str, DeviceId]
    partly: Mapping[DeviceId, Sequence[Layer]]


def _shares(outline: Outline, budgets: Budgets, terms: _Terms) -> Iterator[_Shares]:
    """Yield how layers can be shared out: partly to the main device alone, or to accelerators as many as may stream."""
    main, accelerators = _computing(budgets)
    homes, rest = _others(outline, budgets, accelerators[1:])
    yield _Shares(homes, {main: rest})
    rooms = {device: room for device in accelerators if (room := budgets[device]) is not None}
    for streaming in devices_to_share(rooms, terms.rates, most=terms.links or len(rooms)):
        homes, rest = _others(outline, budgets, [device for device in rooms if device not in streaming])
        wanted = wanted_bytes(rest, {device: rooms[device] for device in streaming}, terms.rates)
        yield _Shares(homes, share_layers(outline, rest, wanted))


def _sharing(outline: Outline, placement: Placement, shares: _Shares) -> Placement:
    """Return ``placement`` with those layers computing where their share is that have nothing on any accelerator."""
    computes: dict[str, DeviceId] = {}
    for device, layers in shares.partly.items():
        for layer in layers if device != placement.main else ():
            leaders = map(outline.skeleton.leader, layer.owned or layer.tensors)
            if not any(isinstance(placement.homes[leader], int) for leader in leaders):
                computes[layer.name] = device
    return replace(placement, computes=computes)


def _partly_resident(outline: Outline, budgets: Budgets, terms: _Terms) -> Iterator[Placement]:
    """Yield the placements of partly resident layers: to one accelerator, and to as many as can stream.

    Where links are unlike a slow one may be better left out: then fewer are tried too.
    """
    for plain_stays in (False, True) if outline.packed else (False,):
        alone, *spread = _shares(outline, budgets, terms)
        yield from _split(outline, budgets, alone, plain_stays=plain_stays)
        tried = ([*_evened(outline, budgets, shares, terms.rates, plain_stays=plain_stays)] for shares in spread)
        yield from chain.from_iterable(tried) if terms.rates.links else next(filter(None, tried), ())


def _evened(
    outline: Outline, budgets: Budgets, shares: _Shares, rates: Rates, *, plain_stays: bool
) -> Iterator[Placement]:
    """Yield the placements of ``shares``, and of such as have the links bring more evenly, if the budgets hold them."""
    for _ in range(_EVENED):
        placement = next(_split(outline, budgets, shares, plain_stays=plain_stays), None)
        if placement is None:
            return
        yield placement
        brought = {
            device: sum(
                outline.sizes[name]
                for layer in layers
                for name in layer.owned
                if not isinstance(placement.homes[name], int)
            )
            for device, layers in shares.partly.items()
        }
        left = {layer.name for layers in shares.partly.values() for layer in layers}
        layers = [layer for layer in outline.layers if layer.name in left]
        again = share_layers(outline, layers, evened_bytes(shares.partly, brought, rates))
        if again == shares.partly:
            return
        shares = replace(shares, partly=again)


def _split(
    outline: Outline,
    budgets: Budgets,
    shares: _Shares,
    *,
    plain_stays: bool = False,
    wide: frozenset[str] = frozenset(),
) -> Iterator[Placement]:
    """Yield the placement of partly resident layers, if the budgets can hold one.

    If ``plain_stays``, no more is streamed than what rests packed, which is read in fewer bytes. What is ``wide`` is
    streamed in any case, by blocks of rows.
    """
    main, accelerators = _computing(budgets)
    homes, away, alone = dict(shares.whole), set[str](), len(shares.partly) == 1
    to_main = alone and main in shares.partly
    for device, layers in shares.partly.items():
        room = budgets.get(device, 0)
        streamed = _streamed_of(outline, layers, device, room, plain_stays=plain_stays, alone=alone, wide=wide)
        if streamed is None:
            return
        homes |= {name: device for layer in layers for name in layer.owned if name not in streamed}
        away |= streamed
    homes |= below(outline, [name for layer in outline.layers for name in layer.owned if name in away], main, budgets)
    first = main if to_main else next(filter(lambda device: device in homes.values(), accelerators), main)
    placement = _sharing(outline, Placement(homes, first), shares)
    short = lay_out(outline, placement, budgets).shortage(tight=bool(wide))
    if short is None and (main in homes.values() or not to_main):
        yield placement


def _streamed_of(
    outline: Outline,
    layers: Sequence[Layer],
    device: DeviceId,
    room: int | None,
    *,
    plain_stays: bool,
    alone: bool,
    wide: frozenset[str],
) -> set[str] | None:
    """Return the tensors of ``layers`` that are streamed to ``device``, if others fit into its ``room``, or null."""
    if room is None:
        return None
    tables = {name for layer in layers for name in layer.owned if device == CPU and name in outline.tables}
    stays = {name for layer in layers for name in layer.owned if plain_stays and name not in outline.packed} - tables
    if device == CPU:  # what code makes is there anyway
        stays |= outline.computed & {name for layer in layers for name in layer.owned}
    left = room - total_bytes(outline, stays)
    streamed = least_streamed(outline, _without(outline, layers, tables | stays | wide), left, alone=alone)
    if streamed is None:
        return None
    streamed |= wide
    kept = sum(layer.bytes for layer in layers) - total_bytes(outline, streamed | tables)
    return streamed | (tables - fitting(outline, tables, 0 if streamed else room - kept))


def _without(outline: Outline, layers: Sequence[Layer], names: set[str]) -> list[Layer]:
    """Return ``layers`` without the tensors ``names``."""
    left = [(layer, tuple(name for name in layer.owned if name not in names)) for layer in layers]
    return [replace(layer, owned=mine, bytes=sum(outline.sizes[name] for name in mine)) for layer, mine in left]


def _others(outline: Outline, budgets: Budgets, others: Sequence[DeviceId]) -> tuple[dict[str, DeviceId], list[Layer]]:
    """Return the homes of the layers that other accelerators than the main one hold whole, and the layers left."""
    if not others:
        return {}, list(outline.layers)
    homes = fill(outline, {**{device: budgets[device] for device in others}, DISK: None})
    kept = {name: home for name, home in homes.items() if home != DISK}
    return kept, [layer for layer in outline.layers if not kept.keys() & set(layer.owned)]
