"""What brings the parts of a model: for each device that computes some, a carrier and the lookahead over it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stages.checkpoints.packed import AtRest
from stages.dispatch.dispatch_plan import DispatchPlan
from stages.dispatch.streaming.bindings import Binding, settle
from stages.dispatch.streaming.lookahead import Lookahead
from stages.dispatch.streaming.streamed_part import StreamedPart
from stages.dispatch.streaming.turns import Place
from stages.dispatch.transfer.carrier import Carrier, Traffic
from stages.dispatch.transfer.host_carrier import HostCarrier
from stages.dispatch.transfer.link import Link, pin
from stages.dispatch.transfer.link_carrier import LinkCarrier
from stages.dispatch.transfer.links import open_link
from stages.dispatch.transfer.trace import Trace
from stages.empty_init.skeleton import parent, upward
from stages.machine.aligned_memory import HostBlock
from stages.machine.devices import Devices
from stages.units import CPU, DeviceId

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
    traffic: Traffic,
    trace: Trace | None,
) -> Iterator[Lookahead[Any]]:
    """Give each of ``parts`` to the lookahead of the device that computes it, and yield the lookaheads.

    ``extents`` has what waits on disk.
    """
    places = part_places(plan)
    for device in dict.fromkeys(part.computes for part in parts):
        mine = [part for part in parts if part.computes == device]
        numbers = {part.name: number for number, part in enumerate(mine)}
        order = [numbers[name] for name in plan.order if name in numbers]
        experts, lasting = _listed_experts(numbers, plan), _lasting(numbers, plan)
        carrier: Carrier[Any]
        if device == CPU:
            on_disk = [[extents[binding.name] for binding in part.bindings] for part in mine]
            carrier = HostCarrier(
                on_disk,
                staging_bytes=plan.staging_bytes,
                optional=experts,
                lasting=lasting,
                traffic=traffic,
                trace=trace,
            )
        else:
            sources = [[_source(binding, extents) for binding in part.bindings] for part in mine]
            carrier = LinkCarrier(
                sources,
                links(device),
                staging_bytes=plan.reserves.get(device, 0),
                optional=experts,
                lasting=lasting,
                traffic=traffic,
                trace=trace,
            )
        lookahead: Lookahead[Any] = Lookahead(carrier, order, experts=experts, traffic=traffic, trace=trace)
        for part in mine:
            part.lookahead, part.number = lookahead, numbers[part.name]
            part.place = places.get(part.name, (0,))
        yield lookahead


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


def _source(binding: Binding, extents: Mapping[str, AtRest]) -> AtRest | torch.Tensor:
    return extents[binding.name] if binding.host is None else binding.host


def _listed_experts(numbers: Mapping[str, int], plan: DispatchPlan) -> list[list[int]]:
    """Return the parts of each listed expert by their ``numbers``, as they are in the order of the plan."""
    found: dict[str, list[int]] = {}
    for name, number in numbers.items():
        if expert := plan.parts[name].listed_expert:
            found.setdefault(expert, []).append(number)
    return list(found.values())


def _lasting(numbers: Mapping[str, int], plan: DispatchPlan) -> set[int]:
    """Return the parts, by their ``numbers``, that are there while others come: those of modules around modules."""
    inside: Counter[str] = Counter()
    for name in numbers:
        inside.update({above for caller in plan.parts[name].callers for above in upward(caller)})
    return {
        number for name, number in numbers.items() if any(inside[caller] > 1 for caller in plan.parts[name].callers)
    }
