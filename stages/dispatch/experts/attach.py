"""Attaching a mixture's experts: their stacks wait in the model, and pools of slots stand behind them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import nn

from offstage.stages.checkpoints.extents import Extent
from offstage.stages.dispatch.dispatch_plan import DispatchPlan
from offstage.stages.dispatch.experts.expert_slots import Bank, ExpertSlots, ExpertUse
from offstage.stages.dispatch.experts.expert_stack import ExpertStack, StackUse
from offstage.stages.dispatch.experts.routed_experts import RoutedExperts
from offstage.stages.dispatch.experts.slot_memory import ExpertLayer, Kind, Phases, RowShape, kind_bytes, slot_rows
from offstage.stages.dispatch.streaming.caches import part_positions
from offstage.stages.dispatch.streaming.lockstep import WaitFor
from offstage.stages.dispatch.streaming.places import TensorPlace, have_wait_for, place_of
from offstage.stages.dispatch.streaming.saved_weights import SavedWeights
from offstage.stages.dispatch.streaming.transport import Transport
from offstage.stages.dispatch.streaming.uncompiled import uncompiled
from offstage.stages.dispatch.transfer.part_layout import RowSource, read_lengths
from offstage.stages.dispatch.transfer.pinned_buffers import PinnedBuffers
from offstage.stages.empty_init.skeleton import ExpertsSpec
from offstage.stages.machine.aligned_memory import TENSOR_ALIGNMENT
from offstage.stages.machine.probes import bounce_buffers
from offstage.stages.plan.expert_slots import bank_bounds, wanted
from offstage.stages.shard_load.sources import DiskWeights
from offstage.stages.units import DeviceId, Position


@dataclass(slots=True)
class _Mixed:
    """The experts of one module that wait: their spec, where they compute, their places in the model, and where the
    rows of each stack wait, by its attribute. ``position`` is when they come in a pass.
    """

    number: int
    position: Position
    spec: ExpertsSpec
    computes: DeviceId
    places: Sequence[TensorPlace]
    rows: Mapping[str, Sequence[RowSource]]


@dataclass(slots=True)
class RoutedModel:
    """All experts of a model that wait: slots of those that are stacked, and what each layer's came to, by module."""

    uses: dict[str, ExpertUse] = field(default_factory=dict)
    pools: list[ExpertSlots] = field(default_factory=list)
    layers: list[RoutedExperts] = field(default_factory=list)

    def begin_pass(self) -> None:
        """Say that a forward of the model begins."""
        for layer in self.layers:
            layer.forget()
        for pool in self.pools:
            pool.begin_pass()


def expert_places(model: nn.Module, plan: DispatchPlan, stored: DiskWeights) -> dict[str, list[TensorPlace]]:
    """Return the places of all expert stacks of ``model`` that wait, by module."""
    return {
        name: [place_of(model, tensor, has_data=tensor not in stored) for tensor in part.experts.tensors]
        for name, part in plan.parts.items()
        if part.experts is not None
    }


def attach_experts(
    routed: RoutedModel,
    model: nn.Module,
    places: Mapping[str, Sequence[TensorPlace]],
    transport: Transport,
    *,
    saved: SavedWeights | None = None,
    wait_for: WaitFor = lambda shared: None,
) -> None:
    """Have the experts in ``places`` of ``model`` be brought for what tokens are routed to, as ``routed``.

    ``saved`` sees what autograd saves of the model; ``wait_for`` returns when the caller may use a layer's experts.
    """
    saved, plan = saved or SavedWeights(), transport.plan
    mixed = list(_mixed(plan, places, transport.stored))
    for (computes, kind), members in _by_kind(mixed).items():
        pool = _open_slots(
            members,
            kind,
            _share(plan.slots.get(computes, 0), kind, members, mixed),
            together=max(round(wanted(each.spec.count, each.spec.per_token, plan.pass_tokens)) for each in members),
            transport=transport,
        )
        routed.pools.append(pool)
        for each in members:
            experts = RoutedExperts(pool, each.number, [*each.rows], saved, wait_for=wait_for, position=each.position)
            routed.uses[each.spec.module] = pool.uses[each.number]
            routed.layers.append(experts)
            device = transport.devices.torch_device(computes)
            for place in each.places:  # stacks that bring their own rows
                have_wait_for(place, transport.stored, device, ExpertStack, StackUse(experts, place.attribute))
                transport.stack.callback(place.come_home)
            module = model.get_submodule(each.spec.module)
            before = module.register_forward_pre_hook(uncompiled(experts.begin), with_kwargs=True)
            after = module.register_forward_hook(uncompiled(experts.end), always_call=True)
            transport.stack.callback(before.remove)
            transport.stack.callback(after.remove)


def _open_slots(
    members: Sequence[_Mixed], kind: Kind, slot_bytes: int, *, together: int, transport: Transport
) -> ExpertSlots:
    """Return the slots of experts of one ``kind`` in ``slot_bytes`` of the device that computes them, one at least.

    A call of a layer is likely to use so many experts ``together``. What is read on its way to a slot passes through
    buffers, since direct reads can't choose where a row begins.
    """
    device = members[0].computes
    link = transport.link(device)
    experts = sum(each.spec.count for each in members)
    bounds = bank_bounds(
        max(1, min(slot_bytes // max(1, kind_bytes(kind)), experts)),
        layers=len(members),
        largest=max(each.spec.count for each in members),
        together=together,
    )
    phases = _phases(kind, members) if link.in_place else {}
    banks = [Bank(slots) for slots in slot_rows(kind, bounds, link, room=slot_bytes, phases=phases)]
    rows = [row for each in members for stack_rows in each.rows.values() for row in stack_rows]
    places = [place for row in rows for place in ((row,) if isinstance(row, torch.Tensor) else row)]
    passing = [place for place in places if not link.in_place or isinstance(place, Extent)]
    lengths = read_lengths(passing, as_at_rest=device in transport.unpackers)
    buffers = PinnedBuffers(link, count=bounce_buffers(max(lengths)), size=max(lengths)) if lengths else None
    if buffers is not None:
        transport.stack.callback(buffers.close)
    pool = ExpertSlots(
        [ExpertLayer(each.number, each.spec.module, each.rows) for each in members],
        {each.number: banks[place % len(banks)] for place, each in enumerate(members)},
        transport.mover(device, places, buffers),
    )
    transport.stack.callback(pool.close)
    return pool


def _phases(kind: Kind, members: Sequence[_Mixed]) -> Phases:
    """Return how stacks of ``kind`` begin where they wait, as far as all rows of a stack begin alike."""
    return {
        (each.number, attribute): beyond if (beyond := _beyond(each.rows[attribute])) % row.dtype.itemsize == 0 else 0
        for attribute, row in kind
        if row.bytes % TENSOR_ALIGNMENT == 0
        for each in members
    }


def _beyond(rows: Sequence[RowSource]) -> int:
    """Return how far the stack of ``rows`` begins beyond a multiple of ``TENSOR_ALIGNMENT``.

    One of which a file has the rows apart would begin at such a multiple, where they were brought together.
    """
    if isinstance(rows[0], torch.Tensor):
        return rows[0].data_ptr() % TENSOR_ALIGNMENT
    places = [row[0] for row in rows if len(row) == 1 and isinstance(row[0], Extent)]
    follow = all(after.file == one.file and after.begin == one.end for one, after in pairwise(places))
    return places[0].begin % TENSOR_ALIGNMENT if follow and len(places) == len(rows) else 0


def _mixed(plan: DispatchPlan, places: Mapping[str, Sequence[TensorPlace]], stored: DiskWeights) -> Iterator[_Mixed]:
    positions = part_positions(plan)
    for number, (name, stacks) in enumerate(places.items()):
        spec = plan.parts[name].experts
        assert spec is not None
        rows = {place.attribute: list(_rows(place, stored)) for place in stacks}
        assert all(len(stack_rows) == spec.count for stack_rows in rows.values()), name
        yield _Mixed(number, positions.get(name, (0,)), spec, plan.parts[name].execution, stacks, rows)


def _by_kind(mixed: Sequence[_Mixed]) -> dict[tuple[DeviceId, Kind], list[_Mixed]]:
    """Return the experts that can lie in the same slots, by the device that computes them and what they have."""
    groups: dict[tuple[DeviceId, Kind], list[_Mixed]] = defaultdict(list)
    for each in mixed:
        kind = tuple(
            (place.attribute, RowShape(tuple(place.before.shape[1:]), place.before.dtype)) for place in each.places
        )
        groups[each.computes, kind].append(each)
    return groups


def _share(slot_bytes: int, kind: Kind, members: Sequence[_Mixed], mixed: Sequence[_Mixed]) -> int:
    """Return the part of a device's ``slot_bytes`` that experts of ``kind`` have: as large as theirs of all experts."""
    mine = sum(each.spec.count for each in members) * kind_bytes(kind)
    neighbours = [each for each in mixed if each.computes == members[0].computes]
    whole = sum(place.before.nbytes for each in neighbours for place in each.places)
    return slot_bytes * mine // max(1, whole)


def _rows(place: TensorPlace, stored: DiskWeights) -> Sequence[RowSource]:
    """Return where each row of the stack in ``place`` waits."""
    return stored.rows[place.name] if place.host is None else place.host.detach().unbind(0)
