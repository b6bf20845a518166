"""What brings the parts of a model: a cache for each device that computes some, and what unpacks what comes packed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from offstage.stages.checkpoints.device_codec import can_unpack
from offstage.stages.checkpoints.packed import AtRest, MemoryFile, PackedTensor, rows_of
from offstage.stages.dispatch.dispatch_plan import DispatchPlan
from offstage.stages.dispatch.experts.eviction import Expert
from offstage.stages.dispatch.experts.expert_slots import ExpertLayer
from offstage.stages.dispatch.experts.listed_slots import ListedSlots, SlotRegions
from offstage.stages.dispatch.streaming.bindings import Binding, settle
from offstage.stages.dispatch.streaming.lockstep import Place
from offstage.stages.dispatch.streaming.streamed_part import StreamedPart
from offstage.stages.dispatch.streaming.weight_cache import WeightCache
from offstage.stages.dispatch.transfer.device_unpacker import DeviceUnpacker, open_unpacker
from offstage.stages.dispatch.transfer.link import Link, pin
from offstage.stages.dispatch.transfer.links import HostLink, open_link
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
from offstage.stages.dispatch.transfer.ring import SMALL_BYTES, Ring, slot_bytes
from offstage.stages.dispatch.transfer.trace import Trace
from offstage.stages.dispatch.transfer.traffic import Traffic
from offstage.stages.empty_init.skeleton import parent
from offstage.stages.machine.aligned_memory import ALIGNMENT, Bytes, HostBlock, align_up
from offstage.stages.machine.devices import Devices
from offstage.stages.plan.lasting_parts import place_lasting
from offstage.stages.shard_load.sources import DiskWeights
from offstage.stages.units import CPU, DEVICE_ALIGNMENT, DeviceId

_ALIGNED_TENSORS = 32
"""Tensors on their way at once that the staging memory on the host has alignment to spare for."""

OpenLink = Callable[[Devices, DeviceId], Link]


@dataclass(slots=True)
class Links:
    """The links to what is behind ``devices``, each opened once, by ``open``."""

    devices: Devices
    open: OpenLink = open_link
    opened: dict[DeviceId, Link] = field(default_factory=dict)

    def __call__(self, device: DeviceId) -> Link:
        """Return the link to ``device``."""
        if device not in self.opened:
            self.opened[device] = self.open(self.devices, device) if self.devices.is_apart(device) else HostLink()
        return self.opened[device]


def open_caches(
    parts: Sequence[StreamedPart],
    plan: DispatchPlan,
    *,
    extents: Mapping[str, AtRest],
    links: Links,
    unpackers: Mapping[DeviceId, DeviceUnpacker],
    traffic: Traffic,
    trace: Trace | None,
    stack: ExitStack,
) -> list[WeightCache]:
    """Give each of ``parts`` to the cache of the device that computes it; return the caches.

    ``extents`` has what waits on disk. All bring ahead at once, each within the reserve of its device; those behind a
    link read by way of the same buffers, and unpack by ``unpackers`` where there are. They are closed with ``stack``.
    """
    found = []
    places, computing = part_places(plan), _by_device(parts)
    buffers = _pin_buffers(computing, plan, extents=extents, links=links, unpackers=unpackers, stack=stack)
    for device, mine in computing.items():
        sources, link = _sources(mine, extents), links(device)
        mover = Mover(
            link,
            [source for part in sources for source in part],
            device=device,
            buffers=buffers,
            unpacker=unpackers.get(device),
            traffic=traffic,
            trace=trace.of(device) if trace is not None else None,
        )
        cache = make_cache(
            sources,
            mover,
            _order_of(mine, plan),
            staging_bytes=plan.staging_bytes if link.in_place else plan.reserves.get(device, 0),
            callers=_callers(mine, plan),
            lists=_listed_experts(mine, plan),
        )
        for number, part in enumerate(mine):
            part.cache, part.number = cache, number
            part.place = _place_of(part, places)
        stack.callback(cache.close)
        found.append(cache)
    return found


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
    alignment = ALIGNMENT if link.in_place else DEVICE_ALIGNMENT
    layouts, room = _lay_out_all(sources, callers, link=link, staging_bytes=staging_bytes)
    sizes = {part: layout.size for part, layout in enumerate(layouts)}
    padded = {part: align_up(size, alignment) for part, size in sizes.items()}
    experts = [expert for each in (lists or {}).values() for expert in each]
    in_lists = {part for expert in experts for part in expert}
    certain = {part: 0 if _lies_apart(size, link) else padded[part] for part, size in sizes.items()}
    certain = {part: size for part, size in certain.items() if part not in in_lists}
    beside = {part: names for part, names in callers.items() if certain.get(part)}
    lasting = place_lasting(beside, certain, alignment=alignment)
    apart = slot_bytes(
        [sum(padded[part] for part in expert) for expert in experts],
        [*certain.values()] or [0],
        least=max(lasting.least, *certain.values(), 0),
        room=room,
    )
    passing = () if apart else in_lists
    ring = Ring(
        link,
        {part: size for part, size in sizes.items() if part not in in_lists or not apart},
        callers=callers,
        passing=passing,
        room=room - apart,
        alignment=alignment,
    )
    slots = _listed_slots(lists or {}, layouts, mover, apart) if apart else None
    return WeightCache(layouts, mover, ring, order, experts=slots, passing=passing)


def _lies_apart(size: int, link: Link) -> bool:
    return link.in_place and size <= SMALL_BYTES


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


def _by_device(parts: Sequence[StreamedPart]) -> dict[DeviceId, list[StreamedPart]]:
    """Return ``parts`` by the device that computes them."""
    found: dict[DeviceId, list[StreamedPart]] = {}
    for part in parts:
        found.setdefault(part.computes, []).append(part)
    return found


def _order_of(parts: Sequence[StreamedPart], plan: DispatchPlan) -> list[int]:
    """Return the numbers of ``parts`` in the order of a pass: those of one module as its call uses them."""
    by_module: dict[str, list[int]] = {}
    for number, part in enumerate(parts):
        by_module.setdefault(part.module, []).append(number)
    return [number for name in plan.order for number in by_module.get(name, ())]


def _place_of(part: StreamedPart, places: Mapping[str, Place]) -> Place:
    """Return when ``part`` comes in a pass: of blocks of rows one after another, inside the call of their module."""
    place = places.get(part.module, (0,))
    return place if part.whole is None else (*place, part.rows.start)


def _at_rest(part: StreamedPart, binding: Binding, extents: Mapping[str, AtRest]) -> AtRest:
    """Return where ``binding`` lies on disk, or those rows of it that ``part`` has."""
    source = extents[binding.name]
    found = source if part.whole is None else rows_of(source, part.rows.start, part.rows.stop)
    assert found is not None, binding.name
    return found


def _sources(parts: Sequence[StreamedPart], extents: Mapping[str, AtRest]) -> list[list[Source]]:
    """Return where the tensors of each of ``parts`` wait."""
    return [
        [_at_rest(part, binding, extents) if binding.host is None else binding.host for binding in part.bindings]
        for part in parts
    ]


def _pin_buffers(
    computing: Mapping[DeviceId, Sequence[StreamedPart]],
    plan: DispatchPlan,
    *,
    extents: Mapping[str, AtRest],
    links: Links,
    unpackers: Mapping[DeviceId, DeviceUnpacker],
    stack: ExitStack,
) -> PinnedBuffers | None:
    """Return the buffers that all links read by way of, pinned until ``stack`` is closed; null where none reads.

    The threads that read are as many however many links there are, and so is what they need.
    """
    apart = [device for device in computing if device != CPU]
    lengths = [
        length
        for device in apart
        for part in _sources(computing[device], extents)
        for length in read_lengths(part, as_at_rest=device in unpackers)
    ]
    staging_bytes = sum(plan.reserves.get(device, 0) for device in apart)
    buffers = buffers_for(lengths, links(apart[0]), staging_bytes=staging_bytes) if apart else None
    if buffers is not None:
        stack.callback(buffers.close)
    return buffers


def part_places(plan: DispatchPlan) -> dict[str, Place]:
    """Return when the parts of ``plan`` come in a pass, by module.

    The experts of a list come one after another where the first does that the plan's order has, or else after what
    comes first around them, their router.
    """
    places: dict[str, Place] = {name: (number,) for number, name in enumerate(plan.order)}
    lists: dict[str, dict[str, list[str]]] = {}
    for name, part in plan.parts.items():
        if part.listed_expert:
            lists.setdefault(parent(part.listed_expert), {}).setdefault(part.listed_expert, []).append(name)
    for holder, experts in lists.items():
        known = [places[name] for names in experts.values() for name in names if name in places]
        around = [place for name, place in places.items() if name.startswith(f"{parent(holder)}.")] if not known else []
        begin = min(known or around, default=(0,))
        for number, names in enumerate(experts.values()):
            places |= {name: (*begin, number, within) for within, name in enumerate(names)}
    return places


def pin_waiting(
    parts: Sequence[StreamedPart],
    experts: Mapping[str, Sequence[Binding]],
    plan: DispatchPlan,
    *,
    host: HostBlock | None,
    links: Links,
) -> Iterator[Callable[[], object]]:
    """Have what waits on the host wait in memory that the accelerators copy from by themselves, whichever it is.

    That is ``host``, if anything lies there, and memory of its own for the rest. Yields what unpins it.
    """
    bindings = [binding for part in parts if part.computes != CPU for binding in part.bindings]
    bindings += [
        binding
        for name, places in experts.items()
        if links.devices.is_apart(plan.parts[name].execution)
        for binding in places
    ]
    computing = [part.computes for part in parts] + [plan.parts[name].execution for name in experts]
    apart = [device for device in computing if links.devices.is_apart(device)]
    for block in settle(bindings, host) if apart else ():
        yield pin(links(apart[0]), block.memory)


def _listed_experts(parts: Sequence[StreamedPart], plan: DispatchPlan) -> dict[str, list[list[int]]]:
    """Return the parts of each listed expert by their numbers, as they are in the order of the plan, by list."""
    found: dict[str, dict[str, list[int]]] = {}
    for number, part in enumerate(parts):
        if part.whole is None and (expert := plan.parts[part.name].listed_expert):
            found.setdefault(parent(expert), {}).setdefault(expert, []).append(number)
    return {name: [*experts.values()] for name, experts in found.items()}


def _callers(parts: Sequence[StreamedPart], plan: DispatchPlan) -> dict[int, tuple[str, ...]]:
    """Return the modules whose calls use each of ``parts``, by its number.

    Of blocks of rows, which are never in use together, the largest stands for all, and its weight for what calls it.
    """
    found: dict[int, tuple[str, ...]] = {}
    for number, part in enumerate(parts):
        if part.whole is None:
            found[number] = plan.parts[part.name].callers
        elif not part.rows.start:
            found[number] = (part.whole.name,)
    return found


def open_unpackers(
    parts: Sequence[StreamedPart],
    experts: Mapping[str, Sequence[Binding]],
    plan: DispatchPlan,
    *,
    stored: DiskWeights,
    links: Links,
    stack: ExitStack,
) -> dict[DeviceId, DeviceUnpacker]:
    """Return the unpackers of the devices that ``plan`` gives room for one, until ``stack`` is closed.

    What waits for them in memory is pinned where it lies.
    """
    waiting: dict[DeviceId, list[PackedTensor]] = {device: [] for device in plan.unpacking}
    for part in parts:
        waiting.get(part.computes, []).extend(_packed_in(part.bindings, stored))
    for module, bindings in experts.items():
        waiting.get(plan.parts[module].execution, []).extend(_packed_in(bindings, stored))
    found: dict[DeviceId, DeviceUnpacker] = {}
    for device, tensors in waiting.items():
        if not links.devices.is_apart(device):
            continue
        unpacker = open_unpacker(links(device), tensors, room=plan.unpacking[device])
        if unpacker is not None:
            found[device] = unpacker
            stack.callback(unpacker.close)
            for memory in _memories(tensors):
                stack.callback(pin(links(device), memory))
    return found


def _packed_in(bindings: Iterable[Binding], stored: DiskWeights) -> Iterator[PackedTensor]:
    """Yield what rests packed of what is brought to ``bindings``: whole tensors, or an expert's part of one."""
    for binding in bindings:
        if binding.host is None:
            source = stored.sources[binding.name]
            rows = source.rows or (source.at,)
            yield from (place for row in rows for place in row if isinstance(place, PackedTensor))


def _memories(tensors: Iterable[PackedTensor]) -> list[Bytes]:
    """Return the pieces of memory in which those of ``tensors`` lie that devices unpack, each once."""
    files = (part.file for tensor in tensors if can_unpack(tensor) for part in tensor.parts)
    found = {file.memory.ctypes.data: file.memory for file in files if isinstance(file, MemoryFile)}
    return [memory for memory in found.values() if memory.nbytes]
