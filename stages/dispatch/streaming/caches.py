"""What has the parts of a model: a cache for each device that computes some."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import torch

from offstage.stages.dispatch.dispatch_plan import DispatchPlan
from offstage.stages.dispatch.experts.eviction import Expert
from offstage.stages.dispatch.experts.listed_slots import ListedSlots
from offstage.stages.dispatch.experts.slot_memory import ExpertLayer, SlotRegions
from offstage.stages.dispatch.streaming.streamed_part import StreamedPart
from offstage.stages.dispatch.streaming.transport import Transport
from offstage.stages.dispatch.streaming.weight_cache import WeightCache
from offstage.stages.dispatch.transfer.link import Link
from offstage.stages.dispatch.transfer.mover import Mover
from offstage.stages.dispatch.transfer.part_layout import (
    NOTHING,
    PartLayout,
    Source,
    lay_out,
    lay_out_reads,
    read_lengths,
)
from offstage.stages.dispatch.transfer.pinned_buffers import PinnedBuffers, buffers_for
from offstage.stages.dispatch.transfer.ring import Ring, alignment_of, ring_parts, slot_bytes
from offstage.stages.empty_init.skeleton import parent
from offstage.stages.machine.aligned_memory import ALIGNMENT, align_up
from offstage.stages.plan.lasting_parts import place_lasting
from offstage.stages.units import CPU, DEVICE_ALIGNMENT, DeviceId, Position

_ALIGNED_TENSORS = 32
"""Tensors on their way at once that the staging memory on the host has alignment to spare for."""


def open_caches(parts: Sequence[StreamedPart], transport: Transport) -> list[WeightCache]:
    """Give each of ``parts`` to the cache of the device that computes it; return the caches.

    All bring ahead at once, each within the reserve of its device; those behind a link read by way of the same buffers.
    """
    caches, plan = [], transport.plan
    positions, computing = part_positions(plan), defaultdict[DeviceId, list[StreamedPart]](list)
    for part in parts:
        computing[part.computes].append(part)
    sources = {device: [part.sources for part in mine] for device, mine in computing.items()}
    buffers = _pin_buffers(sources, transport)
    for device, mine in computing.items():
        mover = transport.mover(device, [source for part in sources[device] for source in part], buffers)
        cache = make_cache(
            sources[device],
            mover,
            _order_of(mine, plan),
            staging_bytes=plan.staging_bytes if mover.link.in_place else plan.reserves.get(device, 0),
            # of blocks of rows, which are never in use together, the largest stands for all
            callers={number: part.callers for number, part in enumerate(mine) if not part.rows.start},
            lists=_listed_experts(mine, plan),
        )
        for number, part in enumerate(mine):
            part.cache, part.number = cache, number
            position = positions.get(part.module, (0,))  # blocks of rows follow each other in the call of their module
            part.position = position if part.whole is None else (*position, part.rows.start)
        transport.stack.callback(cache.close)
        caches.append(cache)
    return caches


def make_cache(
    sources: Sequence[Sequence[Source]],
    mover: Mover,
    order: Sequence[int],
    *,
    staging_bytes: int,
    callers: Mapping[int, Collection[str]] | None = None,
    lists: Mapping[str, Sequence[Sequence[int]]] | None = None,
) -> WeightCache:
    """Return the cache of parts that wait at ``sources``, in ``staging_bytes`` behind the link of ``mover``.

    An accelerator's memory is as large as the largest part at least, and on the host there is what alignment costs
    beside it. ``callers`` has the modules whose calls use each part; ``lists`` the parts of each expert, by the module
    that lists them. These have slots, where there is room for the largest of them beside what is certain.
    """
    link, callers = mover.link, callers or {}
    layouts, room = _lay_out_all(sources, callers, link=link, staging_bytes=staging_bytes)
    experts = [expert for each in (lists or {}).values() for expert in each]
    in_lists = {part for expert in experts for part in expert}
    sizes = {part: layout.size for part, layout in enumerate(layouts)}
    certain = ring_parts(link, {part: size for part, size in sizes.items() if part not in in_lists}, callers=callers)
    groups = [sum(align_up(sizes[part], alignment_of(link)) for part in expert) for expert in experts]
    apart = slot_bytes(groups, certain, room=room)
    if apart:
        slots = _listed_slots(lists or {}, layouts, mover, apart)
        return WeightCache(layouts, mover, Ring(link, certain, room=room - apart), order, experts=slots)
    ring = Ring(link, ring_parts(link, sizes, callers=callers, passing=in_lists), room=room)
    return WeightCache(layouts, mover, ring, order, passing=in_lists)


def _listed_slots(
    lists: Mapping[str, Sequence[Sequence[int]]], layouts: Sequence[PartLayout], mover: Mover, room: int
) -> ListedSlots:
    """Return the slots of listed experts in ``room`` bytes."""
    layers: list[ExpertLayer] = []
    parts: dict[int, tuple[Expert, str]] = {}
    for number, (module, experts) in enumerate(lists.items()):
        most = max(map(len, experts))
        pieces = [[layouts[part] for part in expert] + [NOTHING] * (most - len(expert)) for expert in experts]
        rows = {str(place): [expert[place] for expert in pieces] for place in range(most)}
        layers.append(ExpertLayer(number, module, rows))
        parts |= {
            part: ((number, index), str(place))
            for index, expert in enumerate(experts)
            for place, part in enumerate(expert)
        }
    regions = SlotRegions(layers, mover.link, room)
    return ListedSlots(layers, regions, mover, parts=parts)


def _lay_out_all(
    parts: Sequence[Sequence[Source]], callers: Mapping[int, Collection[str]], *, link: Link, staging_bytes: int
) -> tuple[list[PartLayout], int]:
    """Return the layouts of ``parts``, and how much memory there is for them.

    On an accelerator they are as close as can be where what is there at once has no room otherwise.
    """
    if link.in_place:
        spare = 2 * ALIGNMENT * min(sum(map(len, parts)), _ALIGNED_TENSORS)
        on_disk = [[place for place in part if not isinstance(place, torch.Tensor)] for part in parts]
        return [lay_out_reads(places) for places in on_disk], staging_bytes + spare
    layouts = [lay_out(part, link_room=staging_bytes) for part in parts]
    sizes = {number: layout.size for number, layout in enumerate(layouts)}
    if place_lasting(callers, sizes, alignment=DEVICE_ALIGNMENT).least > staging_bytes:
        layouts = [lay_out(part, link_room=0) for part in parts]
    whole = sum(align_up(layout.size, DEVICE_ALIGNMENT) for layout in layouts)
    return layouts, max(1, *(layout.size for layout in layouts), min(staging_bytes, whole))


def _order_of(parts: Sequence[StreamedPart], plan: DispatchPlan) -> list[int]:
    """Return the numbers of ``parts`` in the order of a pass: those of one module as its call uses them."""
    by_module: dict[str, list[int]] = {}
    for number, part in enumerate(parts):
        by_module.setdefault(part.module, []).append(number)
    order, begun = list[int](), set[str]()
    for name in plan.order:
        module = plan.together.get(name, name)
        order += by_module.get(module, ()) if module not in begun else ()
        begun |= {module} if name in plan.together else set()
    return order


def _pin_buffers(sources: Mapping[DeviceId, Sequence[Sequence[Source]]], transport: Transport) -> PinnedBuffers | None:
    """Return the buffers that all links read by way of; null where none reads.

    The threads that read are as many however many links there are, and so is what they need.
    """
    apart = [device for device in sources if device != CPU]
    lengths = [
        length
        for device in apart
        for part in sources[device]
        for length in read_lengths(part, as_at_rest=device in transport.unpackers)
    ]
    staging_bytes = sum(transport.plan.reserves.get(device, 0) for device in apart)
    buffers = buffers_for(lengths, transport.link(apart[0]), staging_bytes=staging_bytes) if apart else None
    if buffers is not None:
        transport.stack.callback(buffers.close)
    return buffers


def part_positions(plan: DispatchPlan) -> dict[str, Position]:
    """Return when the parts of ``plan`` come in a pass, by module.

    The experts of a list come one after another where the first does that the plan's order has, or else after what
    comes first around them, their router.
    """
    positions: dict[str, Position] = {name: (number,) for number, name in enumerate(plan.order)}
    for name, around in plan.together.items():  # whose call begins before that of the first inside
        positions[around] = min(positions.get(around, positions[name]), positions[name])
    lists: dict[str, dict[str, list[str]]] = {}
    for name, part in plan.parts.items():
        if part.listed_expert:
            lists.setdefault(parent(part.listed_expert), {}).setdefault(part.listed_expert, []).append(name)
    for holder, experts in lists.items():
        own = [positions[name] for names in experts.values() for name in names if name in positions]
        inside = [at for name, at in positions.items() if name.startswith(f"{parent(holder)}.")] if not own else []
        begin = min(own or inside, default=(0,))
        for number, names in enumerate(experts.values()):
            positions |= {name: (*begin, number, within) for within, name in enumerate(names)}
    return positions


def _listed_experts(parts: Sequence[StreamedPart], plan: DispatchPlan) -> dict[str, list[list[int]]]:
    """Return the parts of each listed expert by their numbers, as they are in the order of the plan, by list."""
    lists: dict[str, dict[str, list[int]]] = {}
    for number, part in enumerate(parts):
        if part.name in plan.parts and (expert := plan.parts[part.name].listed_expert):
            lists.setdefault(parent(expert), {}).setdefault(expert, []).append(number)
    return {name: [*experts.values()] for name, experts in lists.items()}
