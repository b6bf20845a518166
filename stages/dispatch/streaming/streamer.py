"""Streaming: offloaded weights are brought in for each use and let go after it.

Built on torch's native module hooks, so ``forward`` is never replaced and removing the hooks leaves the module as it
was. A release hook is called even when the forward raises.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from offstage.pipeline.errors import ConfigError
from offstage.stages.dispatch.dispatch_plan import DispatchPlan
from offstage.stages.dispatch.experts.attach import RoutedModel, attach_experts, expert_places
from offstage.stages.dispatch.streaming.backward import BackwardOrder
from offstage.stages.dispatch.streaming.caches import open_caches, part_positions
from offstage.stages.dispatch.streaming.guard import guard, refuse_calls, shut, unguard
from offstage.stages.dispatch.streaming.inputs import move_inputs
from offstage.stages.dispatch.streaming.passes import ModelPasses
from offstage.stages.dispatch.streaming.places import Newcomers, TensorPlace, have_wait, have_wait_for
from offstage.stages.dispatch.streaming.row_blocks import BlockedWeight, RowBlocks
from offstage.stages.dispatch.streaming.saved_weights import SavedWeights
from offstage.stages.dispatch.streaming.streamed_part import StreamedPart, streamed_parts
from offstage.stages.dispatch.streaming.transport import OpenLink, Transport
from offstage.stages.dispatch.streaming.uncompiled import uncompiled
from offstage.stages.dispatch.streaming.weight_cache import WeightCache
from offstage.stages.dispatch.transfer.link import Link, pin
from offstage.stages.dispatch.transfer.links import open_link
from offstage.stages.dispatch.transfer.trace import Trace
from offstage.stages.empty_init.skeleton import parent
from offstage.stages.hosts.stand_ins import Borders
from offstage.stages.machine.aligned_memory import Bytes, HostBlock, private_bytes
from offstage.stages.machine.devices import Devices
from offstage.stages.shard_load.sources import DiskWeights
from offstage.stages.units import DeviceId

Answer = TypeVar("Answer")

_streamers: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Streamer]] = weakref.WeakKeyDictionary()
"""Each lives with the hooks of its model, and holds it: held here, neither would ever go."""
_FORKED = (
    "this model was loaded before the process was forked, and what brings its weights to an accelerator, or its "
    "experts, isn't in the child: load it there"
)
_EXPORTED = (
    "this model can't be exported: its weights are brought in as it runs, and the program would lack them; export the "
    "plain model, as from_pretrained loads it"
)


def _start_anew() -> None:
    for reference in [*_streamers.values()]:
        streamer = reference()
        if streamer is not None:
            streamer.start_anew()


os.register_at_fork(after_in_child=_start_anew)


def streamer_of(model: nn.Module) -> Streamer:
    """Return the streamer of a dispatched ``model``; a ``ValueError`` for one that isn't."""
    reference = _streamers.get(model)
    streamer = reference() if reference is not None else None
    if streamer is None or not streamer.is_attached:
        raise ValueError(f"this {type(model).__name__} isn't dispatched; load it with offstage.load")
    return streamer


def lockstep(model: nn.Module, calls: Iterable[Callable[[], Answer]], *, size: int = 8) -> list[Answer]:
    """Call all of ``calls``, which call ``model``, at most ``size`` at a time; return what they return, in their order.

    ``model`` is one that ``load``, ``dispatch_model`` and their like dispatched. What it streams is brought once for
    all that are under way, used by each in turn, and let go. Each computes exactly what it computes alone, with a cache
    of its own, which is memory beside the budget; as one ends the next begins. Gradients are off, and random numbers
    are each call's own: all go on from the state that torch has now.

    The first error of a call is raised, after the others were ended. A call may have calls in lockstep itself: these
    go with all others. Raises ``ValueError`` for a model that isn't dispatched or a size below 1.

    >>> with offstage.load(checkpoint, max_memory={"cpu": "3MB"}) as loaded:
    ...     prompts = [loaded.tokenizer(text, return_tensors="pt") for text in ("If the memory", "The")]
    ...     calls = [partial(loaded.model.generate, **prompt, max_new_tokens=2) for prompt in prompts]
    ...     answers = offstage.lockstep(loaded.model, calls, size=8)
    >>> [tuple(answer.shape) for answer in answers]
    [(1, 6), (1, 4)]
    """
    if type(size) is not int or size < 1:
        raise ValueError(f"size: {size!r} is no number of calls; give a whole number from 1")
    answers: dict[int, Answer] = {}

    def answer(number: int, call: Callable[[], Answer]) -> None:
        answers[number] = call()

    tasks = (partial(answer, number, call) for number, call in enumerate(calls))
    streamer_of(model).passes.go_together(tasks, size=size)
    return [answers[number] for number in sorted(answers)]


class Streamer:
    """The hooks of one dispatched model, and the caches behind them: one for each device that computes; ``passes`` are
    those of the model, by which calls go one after another or together.

    ``stored`` has what waits on disk; what waits on the host is in the model, best in the block ``host``. ``devices``
    are those behind the device ids. How each tensor is served, the plan says. ``skip_keys`` are
    arguments that stay where they are, by default those that the model declares. ``borders`` are where the model meets
    what other hosts compute.
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
        open_link: OpenLink = open_link,
        skip_keys: str | Collection[str] | None = None,
        borders: Borders | None = None,
    ) -> None:
        self._stack = ExitStack()
        self._transport = Transport(plan, stored, devices, self._stack, trace=trace, open=open_link)
        self.traffic, self.trace = self._transport.traffic, trace
        self._model, self._stored, self._devices, self._skip_keys = model, stored, devices, skip_keys
        self.routed = RoutedModel()
        self._saved = SavedWeights()
        self._caches: list[WeightCache] = []
        self._parts: list[StreamedPart] = []
        self._refusal: str | None = None
        self._at_begin: list[Callable[[], object]] = [self._is_there]  # of each pass, while the hooks serve
        self._at_end: list[Callable[[], object]] = []
        self.passes = ModelPasses(
            model,
            begin=self._at_begin,
            end=self._at_end,
            recover=self._recover,
            is_left=lambda: self._saved.in_calls,
            reuses=plan.reuses,
        )
        if borders is not None:
            self.passes.meet(borders, part_positions(plan))
        self._backward = BackwardOrder(self.passes.lock.hold)
        self.is_attached = True
        with ExitStack() as undo:  # all or nothing: a device may be full, a file gone
            undo.callback(self.remove)
            self._hook(plan, host)
            self._newcomers = Newcomers(model)
            self._stack.callback(self._newcomers.forget)
            # no more is on a byte's way than has to be
            self._at_begin += [self._newcomers.check, self.routed.begin_pass, self._backward.begin_pass]
            self._at_begin += [cache.begin_pass for cache in self._caches]
            self._at_end += [self._backward.end_pass, *(cache.end_pass for cache in self._caches)]
            undo.pop_all()
        _streamers[model] = weakref.ref(self)

    @property
    def is_apart(self) -> bool:
        """Whether anything computes in memory that isn't the host's own."""
        return bool(self._transport.apart)

    def pinned(self, size: int) -> Bytes:
        """Return so many bytes of host memory that the accelerators copy from by themselves, until it is gone."""
        memory = private_bytes(size)
        pin(self._transport.link(self._transport.apart[0]), memory)
        return memory

    def link_to(self, device: torch.device) -> Link | None:
        """Return a link to ``device``; null where nothing that streams has one there."""
        apart = (each for each in self._transport.apart if self._devices.torch_device(each) == device)
        accelerator = next(apart, None)
        return None if accelerator is None else self._transport.link(accelerator)

    def remove(self, *, refusal: str | None = None) -> None:
        """Take all hooks off the model, when what is under way is done, in other threads too.

        Its streamed weights wait where they did, no file is open, no memory is pinned, and the staging memory is free.
        With ``refusal`` they won't come back: that is what ends each use from here on, in calls too that waited for
        their turn meanwhile, which go on without hooks otherwise.
        """
        with self.passes.lock.hold():
            self.is_attached, self._refusal = False, refusal or self._refusal
            if refusal is not None:  # before the hooks go, since a call of another thread may begin meanwhile
                refuse_calls(self._model, refusal)
            del self._at_begin[1:], self._at_end[:]
            self._stack.close()
            self._caches.clear()
            if refusal is not None:
                shut(self._model, refusal)

    def start_anew(self) -> None:
        """Go on in a process that was forked from the one where the model was loaded: no thread reads here yet."""
        in_use = self.passes.start_anew()
        able = [cache.start_anew(in_use=in_use) for cache in self._caches]
        if self.routed.pools or not all(able):
            self._refusal = _FORKED
        if not in_use:
            self._recover()

    def _hook(self, plan: DispatchPlan, host: HostBlock | None) -> None:
        main = self._devices.torch_device(plan.main_device)
        offloaded = tuple(name for part in plan.parts.values() for name in part.serving)
        guard(self._model, main, streamed=offloaded)
        self._stack.callback(unguard, self._model)
        entries = {name: self._devices.torch_device(device) for name, device in plan.entries.items()}
        if any(device.type != "cpu" for device in entries.values()):
            for unhook in move_inputs(self._model, entries, main=main, skip_keys=self._skip_keys):
                self._stack.callback(unhook)
        parts = self._parts
        parts += streamed_parts(self._model, plan, self._stored, devices=self._devices, stack=self._stack)
        experts = expert_places(self._model, plan, self._stored)
        brought = [part for part in parts if part.brought]
        waiting: dict[DeviceId, list[TensorPlace]] = {}
        for part in brought:
            waiting.setdefault(part.computes, []).extend(part.places)
        for name, places in experts.items():
            waiting.setdefault(plan.parts[name].execution, []).extend(places)
        self._transport.pin(waiting, host)
        self._transport.open_unpackers(waiting)
        self._caches += open_caches(brought, self._transport)
        for cache in self._caches:
            if cache.experts is not None:
                self.routed.uses |= cache.experts.uses_by_module
        self._stack.callback(self._backward.forget)
        for part in brought:
            self._stack.callback(setattr, part, "cache", None)
        attach_experts(
            self.routed, self._model, experts, self._transport, saved=self._saved, wait_for=self.passes.wait_for
        )
        self._have_wait(parts, plan)
        for name in experts:
            self._hook_call(self._model.get_submodule(name), self.passes.enter_call, self.passes.leave_call)
        for unhook in self.passes.hook():
            self._stack.callback(unhook)

    def _have_wait(self, parts: Sequence[StreamedPart], plan: DispatchPlan) -> None:
        """Have all of ``parts`` wait: for calls, or as blocks of rows for the products of the weight that they are."""
        for part in parts:
            if part.whole is None:
                for place in part.places:
                    computes = plan.parts[parent(place.name)].execution
                    have_wait(place, self._stored, self._devices.torch_device(computes))
                    self._stack.callback(place.come_home)
                for caller in part.callers:  # before whose call it is brought in, and after it let go
                    module = self._model.get_submodule(caller)
                    self._hook_call(module, partial(self._acquire, part), partial(self._release, part))
        blocked: dict[str, list[StreamedPart]] = {}
        for part in parts:
            if part.whole is not None:
                blocked.setdefault(part.whole.name, []).append(part)
        for blocks in blocked.values():
            whole = blocks[0].whole
            assert whole is not None
            device = self._devices.torch_device(blocks[0].computes)
            rows = RowBlocks(blocks, self._acquire, self._release)
            have_wait_for(whole, self._stored, device, BlockedWeight, rows)
            self._stack.callback(whole.come_home)

    def _hook_call(self, module: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> None:
        """Have ``before`` be called before all else that a call of ``module`` does, and ``after`` however it ends.

        They are told what torch tells hooks.
        """
        self._stack.callback(module.register_forward_pre_hook(uncompiled(before), prepend=True).remove)
        self._stack.callback(module.register_forward_hook(uncompiled(after), always_call=True).remove)

    def _acquire(self, part: StreamedPart, *_: object) -> None:
        """Have ``part`` be bound for one use more, if the hooks still serve once it is the caller's turn."""
        self.passes.enter_call()
        is_used = False
        try:
            if self._is_there():
                if part.is_shared and part.users == 0:
                    self.passes.wait_for(part)
                part.expected = max(0, part.expected - 1)
                if not part.is_bound:
                    part.bind(self._on_host(part) if part.cache is None else part.cache.acquire(part.number))
                self._note_use(part)
                is_used = True
        finally:
            if not is_used:
                self.passes.leave_call()

    def _is_there(self) -> bool:
        """Return whether the hooks still serve, which may go while a call waits for its turn."""
        if self._refusal is not None:
            raise RuntimeError(self._refusal)
        if (self._parts or self.routed.pools) and torch.compiler.is_exporting():
            raise RuntimeError(_EXPORTED)
        return self.is_attached

    def _on_host(self, part: StreamedPart) -> list[torch.Tensor]:
        """Return the tensors of ``part``, which lie where they compute; those that are read there count."""
        if part.streamed_bytes:
            self.traffic.count_use(part.computes, at_rest=part.streamed_bytes, carried=part.streamed_bytes)
        return part.on_host()

    def _note_use(self, part: StreamedPart) -> None:
        """Note a use of ``part``, and have what autograd saves of it be brought again."""
        if part.brought and self._saved.enter(part):
            for index, place in enumerate(part.places):
                if place.bound is not None:
                    self._saved.lend(place.bound, partial(self._backward.save, part, index))
        part.users += 1

    def _release(self, part: StreamedPart, *_: object) -> None:
        """Let ``part`` go when its last user leaves; a call whose acquire failed has nothing to release."""
        if part.users == 0 or not self.passes.lock.is_mine():
            return
        part.users -= 1
        changed = list[str]()
        try:
            if part.brought:
                self._saved.leave(part)
            if part.users == part.expected == 0:
                if self.trace is not None:
                    self.trace.of(part.computes).add(part.name, "compute", part.began)
                changed = [place.name for place in part.places if place.is_written and self._is_lost(place)]
                part.unbind()
                if part.cache is not None:
                    part.cache.release(part.number)
        finally:
            self.passes.leave_call()
        if changed:
            raise ConfigError(
                f"device_map: {changed[0]!r} is streamed, and the model's own code changes it in place, in a call of "
                f"{part.name!r} or around it: the change would be lost; keep it where it computes, with a larger "
                "max_memory or another device_map"
            )

    def _is_lost(self, place: TensorPlace) -> bool:
        """Return whether what was written into ``place`` is not in what waits, so that the next use would lack it."""
        source = self._stored[place.name] if place.host is None else place.host
        return place.bound is not None and not torch.equal(place.bound.detach().to(source.device), source.detach())

    def _recover(self) -> None:
        """Take everything back from a pass that was interrupted."""
        self._saved.recover()
        for part in self._parts:
            part.users = part.expected = 0
            part.unbind()
        for cache in self._caches:
            cache.recover()
