"""Streaming: offloaded weights are brought in for each use and let go after it.

Built on torch's native module hooks, so ``forward`` is never replaced and removing the hooks leaves the module as it
was. A release hook is called even when the forward raises.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipeline.errors import ConfigError
from stages.checkpoints.extents import Extent
from stages.checkpoints.mapped_file import MappedFile
from stages.dispatch.dispatch_plan import DispatchPlan
from stages.dispatch.experts.attach import RoutedModel, attach_experts, expert_bindings
from stages.dispatch.experts.eviction import DEFAULT, POLICIES
from stages.dispatch.streaming.bindings import Binding, have_wait, make_binding, settle, without_data
from stages.dispatch.streaming.guard import guard, is_guarded, unguard
from stages.dispatch.streaming.inputs import move_inputs
from stages.dispatch.streaming.lookahead import Lookahead
from stages.dispatch.streaming.mapped_weights import MappedWeights
from stages.dispatch.streaming.passes import mark_passes
from stages.dispatch.streaming.uncompiled import uncompiled
from stages.dispatch.transfer.carrier import Traffic
from stages.dispatch.transfer.host_carrier import HostCarrier
from stages.dispatch.transfer.link import Link, pin
from stages.dispatch.transfer.link_carrier import LinkCarrier
from stages.dispatch.transfer.links import open_link
from stages.dispatch.transfer.trace import Trace
from stages.machine.aligned_memory import HostBlock
from stages.machine.devices import Devices
from stages.plan.serving import Serving
from stages.shard_load.disk_weights import DiskWeights
from stages.units import CPU, DeviceId

OpenLink = Callable[[Devices, DeviceId], Link]


@dataclass(slots=True)
class _Streamed:
    """The streamed tensors of one module: where they compute (the host, or a device apart), how many calls use them.

    ``lookahead`` delivers them, by the ``number`` that it knows the part by. Those that aren't ``brought`` lie where
    they compute, in memory or in the maps of ``files``, and are only bound there for each use, which counts as
    ``streamed_bytes``.
    """

    name: str
    bindings: list[Binding]
    computes: DeviceId
    brought: bool = True
    files: Sequence[MappedFile] = ()
    streamed_bytes: int = 0
    lookahead: Lookahead[Any] | None = None
    number: int = 0
    users: int = 0
    began: float = 0.0

    def take(self) -> list[torch.Tensor]:
        """Return the tensors of the bindings, in their order; waits for them if it must."""
        if self.lookahead is not None:
            return self.lookahead.take(self.number)
        for file in self.files:
            file.check()
        return [binding.host.detach() for binding in self.bindings if binding.host is not None]


class Streamer:
    """The hooks of one dispatched model, and the lookaheads behind them: one for each device that computes.

    ``stored`` has what waits on disk; what waits on the host is in the model, best in the block ``host``. ``devices``
    are those behind the device ids. How each tensor is served, the plan says. ``eviction`` names the rule by which kept
    experts give up their slots. ``skip_keys`` are arguments that stay where they are, by default those that the model
    declares.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: DispatchPlan,
        *,
        stored: DiskWeights,
        devices: Devices,
        host: HostBlock | None = None,
        trace: Trace | None = None,
        eviction: str = DEFAULT,
        open_link: OpenLink = open_link,
        skip_keys: str | Collection[str] | None = None,
    ) -> None:
        self.traffic, self.trace = Traffic(), trace
        self._model, self._extents, self._stored = model, stored.extents, stored
        self._eviction = eviction
        self._links: dict[DeviceId, Link] = {}
        self.routed = RoutedModel()
        self._devices, self._open_link, self._skip_keys = devices, open_link, skip_keys
        self._lookaheads: list[Lookahead[Any]] = []
        self._empty: set[int] = set()
        self._stack = ExitStack()
        with ExitStack() as undo:  # all or nothing: a device may be full, a file gone
            undo.callback(self.remove)
            self._hook(plan, host)
            self._empty |= {id(tensor) for _, tensor in without_data(model)}
            undo.pop_all()

    @property
    def is_attached(self) -> bool:
        """Whether the model has its hooks."""
        return is_guarded(self._model)

    def remove(self) -> None:
        """Take all hooks off the model, when what is under way is done.

        Its streamed weights wait where they did, no file is open, no memory is pinned, and the staging memory is free.
        """
        self._stack.close()
        self._lookaheads.clear()

    def _hook(self, plan: DispatchPlan, host: HostBlock | None) -> None:
        main = self._devices.torch_device(plan.main_device)
        offloaded = tuple(name for part in plan.parts.values() for name in part.serving)
        guard(self._model, main, streamed=offloaded)
        self._stack.callback(unguard, self._model)
        if main.type != "cpu":
            entries = {name: self._devices.torch_device(device) for name, device in plan.entries.items()}
            for unhook in move_inputs(self._model, entries, skip_keys=self._skip_keys):
                self._stack.callback(unhook)
        parts = list(self._parts(plan))
        experts = expert_bindings(self._model, plan, self._stored)
        brought = [part for part in parts if part.brought]
        self._pin(brought, experts, plan, host)
        self._look_ahead(brought, plan)
        self.routed = attach_experts(
            self._model,
            plan,
            experts,
            stored=self._stored,
            devices=self._devices,
            links=self._link,
            policy=POLICIES[self._eviction],
            traffic=self.traffic,
            stack=self._stack,
            trace=self.trace,
        )
        for part in parts:
            for binding in part.bindings:
                have_wait(binding, self._stored, self._devices.torch_device(plan.parts[part.name].execution))
                self._stack.callback(binding.restore)
            self._stream(part, callers=plan.parts[part.name].callers)
        for unhook in mark_passes(self._model, begin=self._begin, end=self._end, recover=lambda: self._recover(parts)):
            self._stack.callback(unhook)

    def _parts(self, plan: DispatchPlan) -> Iterator[_Streamed]:
        """Yield the parts that are bound for each use, those that are used in maps of their shards mapped."""
        maps = self._stack.enter_context(MappedWeights(self._extents))
        for name, part in plan.parts.items():
            apart = self._devices.is_apart(part.execution)
            bindings: dict[Serving, list[Binding]] = {"copy": [], "direct": [], "map": [], "rows": []}
            for tensor, serving in part.serving.items():
                if serving == "experts":
                    continue
                # A buffer that this checkpoint lacks is where the constructor computed it, whatever the plan says.
                if apart or serving == "copy" or tensor in self._extents:
                    bindings[serving].append(make_binding(self._model, tensor, on_disk=tensor in self._extents))
            if apart and (brought := bindings["copy"] + bindings["direct"]):
                yield _Streamed(name, brought, part.execution)
            if not apart and bindings["direct"]:
                yield _Streamed(name, bindings["direct"], CPU)
            if not apart and bindings["copy"]:
                yield _Streamed(name, bindings["copy"], CPU, brought=False)
            for serving in ("map", "rows"):
                if mapped := bindings[serving]:
                    yield self._mapped(name, mapped, maps, looked_up=serving == "rows")

    def _mapped(self, name: str, bindings: list[Binding], maps: MappedWeights, *, looked_up: bool) -> _Streamed:
        files = maps.use(bindings, looked_up=looked_up)
        streamed = 0 if looked_up else sum(self._extents[binding.name].bytes for binding in bindings)
        return _Streamed(name, bindings, CPU, brought=False, files=files, streamed_bytes=streamed)

    def _link(self, device: DeviceId) -> Link:
        """Return the link to the accelerator ``device``, opened once."""
        if device not in self._links:
            self._links[device] = self._open_link(self._devices, device)
        return self._links[device]

    def _look_ahead(self, parts: Sequence[_Streamed], plan: DispatchPlan) -> None:
        """Give each part to the lookahead of the device that computes it."""
        for device in dict.fromkeys(part.computes for part in parts):
            mine = [part for part in parts if part.computes == device]
            numbers = {part.name: number for number, part in enumerate(mine)}
            order = [numbers[name] for name in plan.order if name in numbers]
            experts = _listed_experts(numbers, plan)
            carrier = (self._host_carrier if device == CPU else self._link_carrier)(mine, plan, experts)
            lookahead: Lookahead[Any] = Lookahead(
                carrier, order, experts=experts, traffic=self.traffic, trace=self.trace
            )
            self._stack.callback(lookahead.close)
            self._lookaheads.append(lookahead)
            for part in mine:
                part.lookahead, part.number = lookahead, numbers[part.name]

    def _pin(
        self,
        parts: Sequence[_Streamed],
        experts: Mapping[str, Sequence[Binding]],
        plan: DispatchPlan,
        host: HostBlock | None,
    ) -> None:
        """Have what waits on the host wait in memory that the accelerators copy from by themselves, whichever it is."""
        bindings = [binding for part in parts if part.computes != CPU for binding in part.bindings]
        bindings += [
            binding
            for name, places in experts.items()
            if self._devices.is_apart(plan.parts[name].execution)
            for binding in places
        ]
        devices = [part.computes for part in parts] + [plan.parts[name].execution for name in experts]
        apart = [device for device in devices if self._devices.is_apart(device)]
        for block in settle(bindings, host) if apart else ():
            self._stack.callback(pin(self._link(apart[0]), block.memory))

    def _host_carrier(
        self, parts: Sequence[_Streamed], plan: DispatchPlan, optional: Sequence[Sequence[int]]
    ) -> HostCarrier:
        extents = [[self._extents[binding.name] for binding in part.bindings] for part in parts]
        return HostCarrier(
            extents, optional=optional, staging_bytes=plan.staging_bytes, traffic=self.traffic, trace=self.trace
        )

    def _link_carrier(
        self, parts: Sequence[_Streamed], plan: DispatchPlan, optional: Sequence[Sequence[int]]
    ) -> LinkCarrier:
        sources = [[self._source(binding) for binding in part.bindings] for part in parts]
        staging, link = plan.reserves.get(parts[0].computes, 0), self._link(parts[0].computes)
        return LinkCarrier(
            sources, link, optional=optional, staging_bytes=staging, traffic=self.traffic, trace=self.trace
        )

    def _source(self, binding: Binding) -> Extent | torch.Tensor:
        return self._extents[binding.name] if binding.host is None else binding.host

    def _stream(self, part: _Streamed, *, callers: tuple[str, ...]) -> None:
        """Bring ``part`` in before, and let it go after, each call of the modules ``callers``."""

        def acquire(_module: nn.Module, _args: Any) -> None:
            self._acquire(part)

        def release(_module: nn.Module, _args: Any, _output: Any) -> None:
            self._release(part)

        for caller in callers:
            module = self._model.get_submodule(caller)
            self._stack.callback(module.register_forward_pre_hook(uncompiled(acquire), prepend=True).remove)
            self._stack.callback(module.register_forward_hook(uncompiled(release), always_call=True).remove)

    def _acquire(self, part: _Streamed) -> None:
        if part.users == 0:
            for binding, tensor in zip(part.bindings, part.take(), strict=True):
                binding.bind(tensor)
            self.traffic.streamed_bytes += part.streamed_bytes
            part.began = time.perf_counter()
        part.users += 1

    def _release(self, part: _Streamed) -> None:
        """Let ``part`` go when its last user leaves; a call whose acquire failed has nothing to release."""
        if part.users == 0:
            return
        part.users -= 1
        if part.users == 0:
            if self.trace is not None:
                self.trace.add(part.name, "compute", part.began)
            changed = [binding.name for binding in part.bindings if binding.is_written and self._is_lost(binding)]
            for binding in part.bindings:
                binding.unbind()
            if part.lookahead is not None:
                part.lookahead.let_go(part.number)
            if changed:
                raise ConfigError(
                    f"device_map: {changed[0]!r} is streamed, and the model's own code changes it in place, in a call "
                    f"of {part.name!r} or around it: the change would be lost; keep it where it computes, with "
                    "a larger max_memory or another device_map"
                )

    def _is_lost(self, binding: Binding) -> bool:
        """Return whether what was written into ``binding`` is not in what waits, so that the next use would lack it."""
        source = self._stored[binding.name] if binding.host is None else binding.host
        return binding.bound is not None and not torch.equal(binding.bound.detach().to(source.device), source.detach())

    def _begin(self) -> None:
        self._refuse_strangers()
        self.routed.begin_pass()
        for lookahead in self._lookaheads:
            lookahead.begin_pass()

    def _refuse_strangers(self) -> None:
        """Refuse parameters that have no data and came after the hooks: what is computed with them would be noise."""
        for name, tensor in without_data(self._model):
            if id(tensor) not in self._empty:
                raise RuntimeError(
                    f"{name!r} is on the meta device and has no data: it was added to the model after it was "
                    "dispatched; add adapters before that, or load it with offstage.load, which tells them where to go"
                )

    def _end(self) -> None:
        for lookahead in self._lookaheads:
            lookahead.end_pass()

    def _recover(self, parts: Sequence[_Streamed]) -> None:
        """Take everything back from a pass that was interrupted."""
        for part in parts:
            part.users = 0
            for binding in part.bindings:
                binding.unbind()
        for lookahead in self._lookaheads:
            lookahead.take_back()


def _listed_experts(numbers: Mapping[str, int], plan: DispatchPlan) -> list[list[int]]:
    """Return the parts of each listed expert by their ``numbers``, as they are in the order of the plan."""
    found: dict[str, list[int]] = {}
    for name, number in numbers.items():
        if expert := plan.parts[name].listed_expert:
            found.setdefault(expert, []).append(number)
    return list(found.values())
