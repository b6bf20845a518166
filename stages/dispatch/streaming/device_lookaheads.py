"""What brings the parts of a model: for each device that computes some, a carrier and the lookahead over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from offstage.stages.checkpoints.packed import AtRest, rows_of
from offstage.stages.dispatch.dispatch_plan import DispatchPlan
from offstage.stages.dispatch.streaming.bindings import Binding, settle
from offstage.stages.dispatch.streaming.lookahead import Lookahead
from offstage.stages.dispatch.streaming.streamed_part import StreamedPart
from offstage.stages.dispatch.streaming.turns import Place
from offstage.stages.dispatch.transfer.carrier import Carrier, Traffic
from offstage.stages.dispatch.transfer.device_unpacker import DeviceUnpacker
from offstage.stages.dispatch.transfer.host_carrier import HostCarrier
from offstage.stages.dispatch.transfer.link import Link, pin
from offstage.stages.dispatch.transfer.link_carrier import LinkCarrier
from offstage.stages.dispatch.transfer.links import open_link
from offstage.stages.dispatch.transfer.part_layout import Source, read_lengths
from offstage.stages.dispatch.transfer.pinned_buffers import PinnedBuffers, buffers_for
from offstage.stages.dispatch.transfer.trace import Trace
from offstage.stages.empty_init.skeleton import parent
from offstage.stages.machine.aligned_memory import HostBlock
from offstage.stages.machine.devices import Devices
from offstage.stages.units import CPU, DeviceId

OpenLink = Callable[[Devices, DeviceId], Link]


@dataclass(slots=True)
class Links:
    """The links to the accelerators behind ``devices``, each opened once, by ``open``."""

    devices: Devices
    open: OpenLink = open_link
    opened: dict[DeviceId, Link] = field(default_factory=dict)

    def __call__(self, device: DeviceId) -> Link:
        """Return the link to the accelerator ``device``."""
        if device not in self.opened:
            self.opened[device] = self.open(self.devices, device)
        return self.opened[device]


def open_lookaheads(
    parts: Sequence[StreamedPart],
    plan: DispatchPlan,
    *,
    extents: Mapping[str, AtRest],
    links: Links,
    unpackers: Mapping[DeviceId, DeviceUnpacker],
    traffic: Traffic,
    trace: Trace | None,
    stack: ExitStack,
) -> list[Lookahead[Any]]:
    """Give each of ``parts`` to the lookahead of the device that computes it; return the lookaheads.

    ``extents`` has what waits on disk. All bring ahead at once, each within the reserve of its device; those behind a
    link read by way of the same buffers, and unpack by ``unpackers`` where there are. They are closed with ``stack``.
    """
    found = []
    places, computing = part_places(plan), _by_device(parts)
    buffers = _pin_buffers(computing, plan, extents=extents, links=links, unpackers=unpackers, stack=stack)
    for device, mine in computing.items():
        numbers = {part.name: number for number, part in enumerate(mine) if part.whole is None}
        order = _order_of(mine, plan)
        experts, callers = _listed_experts(numbers, plan), _callers(mine, plan)
        told = trace.of(device) if trace is not None else None
        carrier: Carrier[Any]
        if device == CPU:
            carrier = HostCarrier(
                [[_at_rest(part, binding, extents) for binding in part.bindings] for part in mine],
                staging_bytes=plan.staging_bytes,
                optional=experts,
                callers=callers,
                traffic=traffic,
                trace=told,
            )
        else:
            carrier = LinkCarrier(
                _sources(mine, extents),
                links(device),
                staging_bytes=plan.reserves.get(device, 0),
                buffers=buffers,
                unpacker=unpackers.get(device),
                optional=experts,
                callers=callers,
                traffic=traffic,
                trace=told,
            )
        lookahead: Lookahead[Any] = Lookahead(
            carrier, order, device=device, experts=experts, traffic=traffic, trace=told
        )
        for number, part in enumerate(mine):
            part.lookahead, part.number = lookahead, number
            part.place = _place_of(part, places)
        stack.callback(lookahead.close)
        found.append(lookahead)
    return found


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


def _listed_experts(numbers: Mapping[str, int], plan: DispatchPlan) -> list[list[int]]:
    """Return the parts of each listed expert by their ``numbers``, as they are in the order of the plan."""
    found: dict[str, list[int]] = {}
    for name, number in numbers.items():
        if expert := plan.parts[name].listed_expert:
            found.setdefault(expert, []).append(number)
    return list(found.values())


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
