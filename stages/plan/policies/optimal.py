"""``optimal``: the fewest predicted seconds a token. That is the least streamed, evenly over the order of execution.

A no-split layer must compute on one device; its tensors needn't wait on one. So part of each layer stays and the rest
is streamed, which saves twice: the budget is filled to within a tensor, and the reserve shrinks from the largest layer
to the largest streamed part of one. The same part of every layer is streamed, so that storage is never idle while
resident layers compute: a token then takes the longer of reading and computing, and not their sum.

For a reserve of r bytes each layer may stream at most r. Which of its tensors stream is a subset-sum problem, small
enough (a dozen tensors, few distinct layers) to be solved exactly. The smallest r whose remaining tensors fit beside
it leaves the fewest bytes to stream. An accelerator besides the main one holds whole layers, since what is streamed
computes on the main device. Where the budget can't hold a layer's worth at all, everything streams, part by part.

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

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from stages.empty_init.skeleton import parent
from stages.machine.rates import Rates
from stages.plan.expert_slots import LEAST, ROOMY, pools
from stages.plan.filling import fill
from stages.plan.outline import Layer, Outline
from stages.plan.placement import (
    Budgets,
    Placement,
    execution_device,
    find_shortage,
    held_bytes,
    kept_free,
    offstage,
    resident_bytes,
    streamed_bytes,
)
from stages.plan.policies.balanced import balanced
from stages.plan.policies.even_choice import below, fitting, total_bytes
from stages.plan.policies.packed_experts import with_experts_packed
from stages.plan.policies.sequential import sequential
from stages.plan.policies.subset_sums import subset_sums
from stages.plan.token_time import slowest, token_seconds
from stages.units import CPU, DISK, DeviceId, in_tier_order

_TRIES = 8
"""How many reserves are tried beyond the least that works: a larger one can waste less of the budget."""
_SHARES = 8
"""How many shares of the host's budget are tried for what lies there as it is used, where some may rest packed."""


def optimal(outline: Outline, budgets: Budgets, rates: Rates | None = None) -> Placement:
    """Return the placement of the fewest seconds a token. Where nothing must be streamed it is the balanced one.

    Among placements that are equally fast (the host's memory may bound both) the one with the least to stream.
    """
    placement = _as_used(outline, budgets, rates)
    stored = {name for name, home in placement.homes.items() if home == DISK and name in outline.packed}
    if outline.experts:
        return with_experts_packed(outline, placement, budgets, rates or Rates())
    if not stored or not budgets.get(CPU):
        return placement
    found = [placement, *_with_packed(outline, budgets, rates)]
    fitting = [one for one in found if find_shortage(outline, one, budgets) is None]
    return min(fitting, key=lambda one: _cost(outline, one, rates or Rates()), default=placement)


def _with_packed(outline: Outline, budgets: Budgets, rates: Rates | None) -> Iterator[Placement]:
    """Yield the placements of which a part of the host's budget holds packed what would be on disk else."""
    budget, least = budgets.get(CPU) or 0, _beside_packed(outline, budgets)
    for share in range(_SHARES):
        room = least + max(0, budget - least) * share // _SHARES
        placement = _as_used(outline, {**budgets, CPU: min(room, budget)}, rates)
        stored = {name for name, home in placement.homes.items() if home == DISK and name in outline.packed}
        held, kept = resident_bytes(outline, placement.homes).get(CPU, 0), kept_free(outline, placement).get(CPU, 0)
        ahead = max(0, _two_largest(outline, stored - outline.lookups) - kept) if placement.main == CPU else 0
        packed = fitting(outline, stored - outline.lookups, budget - held - kept - ahead, at_rest=True)
        yield replace(placement, homes={**placement.homes, **dict.fromkeys(packed, CPU)}, packed=frozenset(packed))


def _two_largest(outline: Outline, names: Iterable[str]) -> int:
    """Return the bytes in use of the two largest parts of ``names``: one is read while the other computes."""
    parts: Counter[str] = Counter()
    for name in names:
        parts[parent(name)] += outline.sizes[name]
    return sum(sorted(parts.values())[-2:])


def _beside_packed(outline: Outline, budgets: Budgets) -> int:
    """Return what the host holds, where it computes, if all that rests packed is streamed, and no more than that."""
    if _computing(budgets)[0] != CPU:
        return 0
    leaders = {name for layer in outline.layers for name in layer.owned}
    stays = {name for name in leaders if name not in outline.packed and not _is_table(outline, name)}
    placement = Placement({name: CPU if name in stays else DISK for name in leaders}, CPU)
    return total_bytes(outline, stays) + kept_free(outline, placement).get(CPU, 0)


def _as_used(outline: Outline, budgets: Budgets, rates: Rates | None) -> Placement:
    """Return the best placement of which all that lies on the host lies there as it is used."""
    whole = balanced(outline, budgets)
    if not kept_free(outline, whole):
        return whole
    mixture = next(_of_mixture(outline, budgets, rates), None) if outline.experts or outline.listed else None
    if mixture is not None:
        return mixture
    found = [sequential(outline, budgets)]
    if not outline.experts:
        found += [*_split(outline, budgets), *_split(outline, budgets, plain_stays=True)]
    found.append(whole)
    if all(find_shortage(outline, placement, budgets) is not None for placement in found):
        found = [*_part_by_part(outline, budgets)] or found
    return min(found, key=lambda placement: _cost(outline, placement, rates or Rates()))


def _of_mixture(outline: Outline, budgets: Budgets, rates: Rates | None) -> Iterator[Placement]:
    """Yield the placements of a mixture, the best first.

    Either all but tables is resident, or all experts wait below, with slots where they compute.
    """
    _, accelerators = _computing(budgets)
    if not accelerators:
        yield from (placement for placement in _split(outline, budgets) if not kept_free(outline, placement))
    one = _largest_expert(outline)
    for computing in (accelerators, [CPU]) if accelerators else ([CPU],):
        rooms = {device: 0 if device in accelerators and computing == [CPU] else budgets[device] for device in budgets}
        for slots, tight in ((ROOMY, False), (LEAST, False), (LEAST, True)):
            least = slots * one
            free = {**rooms, **{device: _less(rooms.get(device, 0), least) for device in computing}}
            placement = _with_experts_below(outline, _as_used(outline.dense, free, rates), budgets)
            shortage = find_shortage(outline, placement, budgets, slots=slots, tight=tight)
            if placement.main in computing and shortage is None:
                yield placement


def _with_experts_below(outline: Outline, dense: Placement, budgets: Budgets) -> Placement:
    """Return the placement ``dense`` of all but the experts with these on the host, as far as it goes, and on disk.

    Those in lists lie where they compute as far as there is room. Where the host computes and has slots, its tables are
    on disk too, but for what all experts in slots leave: a row of a table costs less than the experts that have a slot
    in its place.
    """
    experts = outline.expert_tensors | outline.listed.keys()
    names = [name for layer in outline.layers for name in layer.owned if name in experts]
    away = Placement({**dense.homes, **dict.fromkeys(names, DISK)}, dense.main)
    near = _near(outline, away, budgets) if outline.listed else {}
    held = resident_bytes(outline, {**dense.homes, **near}).get(CPU, 0)
    left = [name for name in names if name not in near]
    room = _less(budgets.get(CPU, 0), held)
    homes = {**dense.homes, **near, **below(outline, left, dense.main, {CPU: room})}
    if outline.experts and dense.main == CPU and room is not None:
        tables = {name for name, home in dense.homes.items() if home == CPU and _is_table(outline, name)}
        spare = room + total_bytes(outline, tables) - total_bytes(outline, left)
        homes |= dict.fromkeys(tables - fitting(outline, tables, spare), DISK)
    return Placement(homes, dense.main)


def _largest_expert(outline: Outline) -> int:
    """Return the bytes of the largest expert, or of a slot for each kind of those that have some."""
    sizes: Counter[str] = Counter()
    for name in outline.listed:
        sizes[outline.skeleton.expert_of[parent(name)]] += outline.sizes[name]
    sharing = pools(outline, dict.fromkeys(outline.experts, CPU)).values()
    return max([*sizes.values(), *(pool.unit_bytes for pool in sharing)])


def _near(outline: Outline, away: Placement, budgets: Budgets) -> dict[str, DeviceId]:
    """Return the experts in lists that the devices hold which compute them, beside what ``away`` has there."""
    held, kept = resident_bytes(outline, away.homes), kept_free(outline, away)
    computed: dict[DeviceId, set[str]] = {}
    for layer in outline.layers:
        device = execution_device(outline, layer, away)
        computed.setdefault(device, set()).update(name for name in layer.owned if name in outline.listed)
    near: dict[str, DeviceId] = {}
    for device, names in computed.items():
        room = budgets.get(device, 0)
        taken = held.get(device, 0) + kept.get(device, 0)
        near |= dict.fromkeys(names if room is None else fitting(outline, names, room - taken), device)
    return near


def _less(room: int | None, count: int) -> int | None:
    return None if room is None else max(0, room - count)


def _cost(outline: Outline, placement: Placement, rates: Rates) -> tuple[float, float, int, int]:
    """Return what makes a placement worse: seconds a token, bytes streamed, those from disk, bytes not accelerated."""
    brought, held = streamed_bytes(outline, placement), resident_bytes(outline, placement.homes, placement.packed)
    for module in offstage(outline, placement):
        experts = outline.experts[module]
        for name in experts.tensors:
            packed = name in outline.packed and placement.homes[name] == DISK
            size = (outline.rest_sizes if packed else outline.sizes)[name] * experts.per_token // experts.count
            unpacked = outline.sizes[name] * experts.per_token // experts.count if packed else None
            brought.add(placement.homes[name], size, unpacked=unpacked)
    seconds = slowest(token_seconds(brought, held, main=placement.main, rates=rates))[1]
    return seconds, brought.bytes, brought.at_rest.get(DISK, 0), -held_bytes(outline, placement.homes)[0]


def _part_by_part(outline: Outline, budgets: Budgets) -> Iterator[Placement]:
    """Yield the placement of which all is streamed to the main device, if that can hold what is in use at once."""
    main, accelerators = _computing(budgets)
    homes, rest = _others(outline, budgets, accelerators[1:])
    names = [name for layer in rest for name in layer.owned]
    placement = Placement({**homes, **below(outline, names, main, budgets)}, main)
    if find_shortage(outline, placement, budgets, tight=True) is None:
        yield placement


def _computing(budgets: Budgets) -> tuple[DeviceId, list[DeviceId]]:
    """Return the main device, and the accelerators with a budget."""
    accelerators: list[DeviceId] = [
        device for device in in_tier_order(budgets) if isinstance(device, int) and budgets[device] != 0
    ]
    return (accelerators[0] if accelerators else CPU), accelerators


def _split(outline: Outline, budgets: Budgets, *, plain_stays: bool = False) -> Iterable[Placement]:
    """Yield the placement of partly resident layers, if the budgets can hold one.

    If ``plain_stays``, no more is streamed than what rests packed, which is read in fewer bytes; where nothing rests
    so, there is no such placement.
    """
    if plain_stays and not outline.packed:
        return
    main, accelerators = _computing(budgets)
    room = budgets.get(main, 0)
    homes, rest = _others(outline, budgets, accelerators[1:])
    tables = {name for layer in rest for name in layer.owned if main == CPU and _is_table(outline, name)}
    stays = {name for layer in rest for name in layer.owned if plain_stays and name not in outline.packed} - tables
    left = None if room is None else room - total_bytes(outline, stays)
    streamed = None if left is None else _least_streamed(outline, _without(outline, rest, tables | stays), left)
    if streamed is None or room is None:
        return
    kept = sum(layer.bytes for layer in rest) - total_bytes(outline, streamed | tables)
    streamed |= tables - fitting(outline, tables, 0 if streamed else room - kept)
    homes |= {name: main for layer in rest for name in layer.owned if name not in streamed}
    homes |= below(outline, [name for layer in rest for name in layer.owned if name in streamed], main, budgets)
    placement = Placement(homes, main)
    if main in homes.values() and find_shortage(outline, placement, budgets) is None:
        yield placement


def _is_table(outline: Outline, leader: str) -> bool:
    """Return whether the tensor is only looked up, under each of its names: on disk it costs next to nothing."""
    return outline.lookups.issuperset(outline.skeleton.names_of(leader))


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


def _least_streamed(outline: Outline, layers: Sequence[Layer], room: int) -> set[str] | None:
    """Return the tensors to stream, so that the others and the staging memory fit into ``room`` bytes, or null.

    The staging memory is to hold two of the largest parts, so that one is read while the other computes; where only
    a single layer's worth fits, that.
    """
    shapes = [_shape(outline, layer) for layer in layers]
    kinds = {shape: subset_sums([size for size, _ in shape]) for shape in dict.fromkeys(shapes)}
    total, counts = sum(layer.bytes for layer in layers), Counter(shapes)
    roomy: list[set[str]] = []
    tight: list[set[str]] = []
    for reserve in sorted({count for kind in kinds.values() for count in kind.sums}):
        most = sum(count * kinds[shape].largest(reserve) for shape, count in counts.items())
        spare = room - reserve - (total - most)
        if spare < 0:
            continue
        chosen = {shape: kind.within(reserve) for shape, kind in kinds.items()}
        away = {layer.owned[place] for layer, shape in zip(layers, shapes, strict=True) for place in chosen[shape]}
        extra = max(0, _two_parts(chosen, counts) - reserve)
        found = roomy if extra <= spare else tight
        if len(found) < _TRIES:
            found.append(away - fitting(outline, away, max(0, spare - extra)))
        if len(roomy) == _TRIES:
            break
    return min(roomy or tight, key=lambda away: sum(outline.rest_sizes[name] for name in away), default=None)


Shape = tuple[tuple[int, int], ...]
"""A layer's tensors: the size of each, and the number of the module in the layer that holds it."""


def _shape(outline: Outline, layer: Layer) -> Shape:
    modules = list(dict.fromkeys(map(parent, layer.owned)))
    return tuple((outline.sizes[name], modules.index(parent(name))) for name in layer.owned)


def _two_parts(chosen: Mapping[Shape, frozenset[int]], counts: Mapping[Shape, int]) -> int:
    """Return the bytes of the two largest parts, where ``chosen`` are the positions that are streamed of each shape.

    A part is what streams together: the tensors of one module.
    """
    parts: list[int] = []
    for shape, places in chosen.items():
        held: Counter[int] = Counter()
        for size, module in (shape[place] for place in places):
            held[module] += size
        parts += list(held.values()) * min(2, counts[shape])
    return sum(sorted(parts)[-2:])
