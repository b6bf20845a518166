"""A model that is in memory already, its weights placed where a caller says and streamed by the engine.

What the field's functions have in common: each decides where the tensors lie, and this makes the dispatch plan for it,
has what is away wait where it can be read, and attaches the streamer. The model's own code isn't run: the order of its
modules is that of registration until the first pass has shown the real one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from offstage.stages.dispatch.accelerate_api.align import AlignDevicesHook, SkipKeys, resolve_device
from offstage.stages.dispatch.accelerate_api.hooks import add_hook_to_module
from offstage.stages.dispatch.dispatch_plan import ModulePlan, make_dispatch_plan
from offstage.stages.dispatch.streaming.places import TensorPlace, places_in
from offstage.stages.dispatch.streaming.streamer import Streamer
from offstage.stages.dispatch.streaming.waiting_tensor import WaitingSource, WaitingTensor, rebuild, send_waiting
from offstage.stages.empty_init.skeleton import Skeleton, TensorSpec, parent, upward
from offstage.stages.machine.devices import Devices
from offstage.stages.machine.host_memory import PROCESS_BYTES, host_memory
from offstage.stages.plan.layout import lay_out
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.placement import Budgets, Placement, resident_bytes
from offstage.stages.plan.plan import Plan, plan_of
from offstage.stages.plan.serving import choose_io
from offstage.stages.shard_load.sources import DiskWeights
from offstage.stages.units import CPU, DISK, DeviceId

STAGED_LAYERS = 2
"""How many of the largest streamed layers the staging memory on the host holds where no budget says more: one of them
computes while the next is read. An accelerator holds one; what of that experts don't need, which come one by one, is
slots for them."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Where a model's weights are to lie and compute.

    ``homes`` has the device of every tensor, tied names included; ``main`` computes what is streamed. Weights on the
    host are bound for each call also where the host computes if they are ``kept_apart``, as the field has it. Buffers
    stay where they are used unless ``offload_buffers``. Modules of the classes ``preload`` are brought in as a whole.
    ``budgets`` are what weights, staging and slots for experts may take together, in bytes; for a device that isn't
    there see ``STAGED_LAYERS``.
    """

    homes: Mapping[str, DeviceId]
    main: DeviceId
    kept_apart: bool = False
    offload_buffers: bool = False
    preload: Collection[str] = ()
    skip_keys: SkipKeys = None
    budgets: Budgets = field(default_factory=dict)

    def may_leave(self, spec: TensorSpec) -> bool:
        """Return whether the tensor may be elsewhere than where it is used."""
        return spec.kind == "parameter" or (self.offload_buffers and spec.persistent)


class EngineHook(AlignDevicesHook):
    """Sends the model's inputs to ``execution_device`` and its output back, as scripts expect of a model's own hook.

    What it was told to send away comes back to where it was when the hook is removed, and so do the buffers that had to
    follow it. A tensor that was never in memory goes on waiting, and reads itself at each use.
    """

    permanent = True

    def __init__(self, execution_device: torch.device, *, skip_keys: SkipKeys = None) -> None:
        super().__init__(execution_device, io_same_device=True, skip_keys=skip_keys)
        self.streamer: Streamer | None = None
        self._away: list[TensorPlace] = []

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has: all but the engine, which is one model's; what waits in the copy reads itself."""
        return {**vars(self), "streamer": None}

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Return ``module``: its weights are placed already."""
        return module

    def send_away(self, place: TensorPlace, waiting: torch.Tensor) -> None:
        """Have ``waiting`` stand in ``place`` for the tensor that was there."""
        place.settle(waiting)
        self._away.append(place)

    def keep_on(self, place: TensorPlace, tensor: torch.Tensor, *, returns: bool) -> None:
        """Have ``tensor`` stand in ``place`` of one on another device, to which it ``returns`` in the end or not."""
        home = place.before.device
        place.settle(tensor)
        if returns and home.type != "meta":
            self.original_devices[place.name] = home
            self._moved.append(place)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Take the engine off and bring everything back."""
        streamer, self.streamer = self.streamer, None
        if streamer is not None:
            streamer.remove()
        for place in self._away:
            place.come_home()
            if isinstance(place.now, WaitingTensor):
                # what is added to it now is to have data
                place.now.source.reported = resolve_device(self.execution_device)
        self._away = []
        return super().detach_hook(module)


def stream(
    model: nn.Module,
    skeleton: Skeleton,
    plan: Plan,
    wanted: Wanted,
    *,
    stored: DiskWeights,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Place the weights of ``model`` as ``plan`` says and attach the engine; where that fails it is as it was.

    The data of what is away is ``stored`` on disk, or among the ``weights`` on the host, by name; else in the model.
    """
    dispatch_plan = make_dispatch_plan(_with_preloaded(skeleton, wanted.preload), plan)
    devices = Devices()
    hook = EngineHook(devices.torch_device(wanted.main), skip_keys=wanted.skip_keys)
    with ExitStack() as undo:
        undo.callback(hook.detach_hook, model)
        placer = _Placer(model, hook, devices, stored, weights or {})
        for name, part in dispatch_plan.parts.items():
            placer.place(name, part)
        hook.streamer = Streamer(model, dispatch_plan, stored=stored, devices=devices, skip_keys=wanted.skip_keys)
        undo.pop_all()
    add_hook_to_module(model, hook, append=True)


def plan_for(skeleton: Skeleton, wanted: Wanted) -> Plan:
    """Return the plan that ``wanted`` spells out."""
    execution = {module: _computes(tensors, wanted) for module, tensors in skeleton.by_module.items()}
    homes = {spec.name: _lies_on(spec, execution[parent(spec.name)], wanted) for spec in skeleton.tensors}
    leaders = {skeleton.leader(name): home for name, home in homes.items()}
    preloaded = {module.name for module in skeleton.modules if module.class_name in wanted.preload}
    experts = tuple(spec for spec in skeleton.experts if not preloaded.intersection(upward(spec.module)))
    outline, placement = Outline(replace(skeleton, experts=experts)), Placement(leaders, wanted.main)
    budgets = _budgets(outline, placement, wanted)
    resident = resident_bytes(outline, leaders)
    free = host_memory().available_bytes - (budgets[CPU] or 0) - PROCESS_BYTES
    io = choose_io("auto", streamed_bytes=resident.get(DISK, 0), free_bytes=free)
    leaves = {spec.name for spec in skeleton.tensors if wanted.may_leave(spec) and homes[spec.name] == CPU}
    apart = leaves if wanted.kept_apart else set[str]()
    layout = lay_out(outline, placement, budgets, io=io, homes=homes, execution=execution, apart=apart)
    whole = replace(outline, skeleton=_with_preloaded(outline.skeleton, wanted.preload))
    reserves = lay_out(whole, placement, budgets, homes=homes, execution=execution).reserves
    plan = plan_of(layout, policy="explicit")
    devices = {device: replace(one, reserve=reserves.get(device, 0)) for device, one in plan.devices.items()}
    return replace(plan, devices=devices)


def _budgets(outline: Outline, placement: Placement, wanted: Wanted) -> dict[DeviceId, int | None]:
    """Return the bytes of the host, and of each accelerator that computes what is streamed, as ``Wanted`` has them."""
    resident, whole = (
        resident_bytes(outline, placement.homes),
        lay_out(replace(outline, routes=False), placement).layer_reserves,
    )
    least = {device: resident.get(device, 0) + count for device, count in whole.items()}
    least[CPU] = resident.get(CPU, 0) + STAGED_LAYERS * whole.get(wanted.main, 0)
    return {device: wanted.budgets.get(device) or count for device, count in least.items()}


def _computes(tensors: Sequence[TensorSpec], wanted: Wanted) -> DeviceId:
    """Return where a module of these ``tensors`` computes: where most of it is accelerated, or on the main device."""
    totals: Counter[DeviceId] = Counter()
    for spec in tensors:
        if isinstance(wanted.homes[spec.name], int):
            totals[wanted.homes[spec.name]] += max(1, spec.bytes)
    return max(totals, key=lambda device: totals[device], default=wanted.main)


def _lies_on(spec: TensorSpec, execution: DeviceId, wanted: Wanted) -> DeviceId:
    home = wanted.homes[spec.name]
    return execution if isinstance(home, int) or not wanted.may_leave(spec) else home


def _with_preloaded(skeleton: Skeleton, classes: Collection[str]) -> Skeleton:
    """Return ``skeleton`` with the modules of ``classes`` as users of all tensors below them."""
    whole = [module.name for module in skeleton.modules if module.class_name in classes]
    users = {
        name: [above for above in whole if not above or name.startswith(f"{above}.")] for name in skeleton.by_module
    }
    borrowers = {
        name: tuple(dict.fromkeys([*skeleton.borrowers.get(name, ()), *users.get(name, ())]))
        for name in {*skeleton.borrowers, *users}
    }
    return replace(skeleton, borrowers={name: modules for name, modules in borrowers.items() if modules})


@dataclass(slots=True)
class _Placer:
    """Has each tensor of a model lie where it computes, or wait; what was one tensor under two names stays one."""

    model: nn.Module
    hook: EngineHook
    devices: Devices
    stored: DiskWeights
    weights: Mapping[str, torch.Tensor]
    moved: MutableMapping[torch.Tensor, torch.Tensor] = field(default_factory=WeakIdKeyDictionary)

    def place(self, name: str, part: ModulePlan) -> None:
        """Place what the module ``name`` holds directly."""
        module, device = self.model.get_submodule(name), self.devices.torch_device(part.execution)
        for place in places_in(module, name):
            if place.name in part.serving:
                self.hook.send_away(place, self._waiting(place.before, place.name, device))
            elif place.before.device != device:
                here = self._resident(place.before, place.name, part)
                self.hook.keep_on(place, here, returns=bool(part.serving))

    def _waiting(self, tensor: torch.Tensor, name: str, device: torch.device) -> torch.Tensor:
        """Return what stands for ``tensor`` while it is away: read from disk, or from the host's memory."""
        if name in self.stored:
            return send_waiting(tensor, WaitingSource(self.stored, name, device), keep=False)
        value = self._value(tensor, name)
        host = value.detach().to(device=CPU, dtype=tensor.dtype if value.is_floating_point() else value.dtype)
        waiting = send_waiting(tensor, WaitingSource({name: host}, name, device), keep=False)
        if waiting.kept is None:
            waiting.kept = tensor if host.data_ptr() == tensor.data_ptr() else rebuild(tensor, host)
        return waiting

    def _resident(self, tensor: torch.Tensor, name: str, part: ModulePlan) -> torch.Tensor:
        """Return ``tensor`` on the device that computes with it."""
        if tensor not in self.moved:
            value = self._value(tensor, name)
            self.moved[tensor] = rebuild(tensor, self.devices.put(value.detach(), part.execution))
        return self.moved[tensor]

    def _value(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        value = self.weights.get(name, tensor)
        if isinstance(value, WaitingTensor):
            raise ValueError(
                f"{name!r} is offloaded already, and was never in memory: load the model again with the device_map or "
                "max_memory that it is to have"
            )
        if value.is_meta:
            raise ValueError(f"{name!r} is on the meta device and has no data; load it, or give it in state_dict")
        return value
