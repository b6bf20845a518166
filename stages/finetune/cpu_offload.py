"""Offload of activations: of what the forward pass saves for the backward pass, a share goes and comes back in time.

It is the twin of what streaming does for weights, on torch's own hooks for saved tensors. The reference is hfai's
``nn.CPUOffload``; torch's ``save_on_cpu`` is the simplest of the kind.
"""

from __future__ import annotations

import weakref
from operator import methodcaller
from pathlib import Path
from types import TracebackType

import torch
from torch.autograd.graph import saved_tensors_hooks

from offstage.pipeline.errors import ConfigError, closest
from offstage.stages.dispatch.streaming.saved_weights import ReferencedTensor
from offstage.stages.dispatch.transfer.trace import Trace
from offstage.stages.finetune.offload_choice import Destination, ShareChoice, history_of
from offstage.stages.finetune.offload_pass import ActivationTraffic, OffloadPass
from offstage.stages.finetune.saved_span import SavedTensor, find_span, is_plain, is_weight, key_of, remember_span
from offstage.stages.machine.devices import Devices
from offstage.stages.units import DeviceId

TARGETS = ("host", "disk")


class CPUOffload:
    """A context in which ``offload_ratio`` of the bytes that are saved for the backward pass are offloaded.

    >>> model, rows = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)), torch.ones(512, 64)
    >>> for _ in range(2):
    ...     with CPUOffload(offload_ratio=0.5, tag="example", target="disk", folder=folder) as offload:
    ...         loss = model(rows).mean()
    ...     loss.backward()
    >>> sorted(offload.traffic)
    ['example']

    The gradients are the same bits as without it. From the second iteration of a ``tag`` on the ratio is held to within
    2% of the bytes; the first measures them. A forward pass is an iteration, whether the object is new or used again.
    The ratio may change from one to the next. Contexts may nest: the innermost decides, as with all hooks for saved
    tensors. Parameters and buffers stay, and so do the smallest tensors, up to 1% of the bytes; what is saved several
    times goes once.

    What lies on an accelerator goes to the host, or with ``target="disk"`` to a file in ``folder`` (the system's for
    temporary files, if that is null). What lies on the host has only the disk to go to. Of a simulated accelerator,
    ``device`` of ``devices``, the ledger counts what stays and what comes back. ``trace`` gets the ways out and back.

    Raises:
        ConfigError: the ratio is no number from 0 to 1, or ``tag``, ``target`` or ``folder`` can't be.
        BudgetError: what stays or comes back has no room on the accelerator, in the pass that needs it.
        StorageError: the disk is full, or fails; nothing is left there.
    """

    def __init__(
        self,
        offload_ratio: float = 0.1,
        tag: str = "block",
        *,
        target: str = "host",
        folder: str | Path | None = None,
        devices: Devices | None = None,
        device: DeviceId = 0,
        trace: Trace | None = None,
    ) -> None:
        self.offload_ratio, self.tag = _check_ratio(offload_ratio), _check_tag(tag)
        self._target, self._folder = _check_target(target, folder), None if folder is None else Path(folder)
        self._devices, self._device, self._trace = devices or Devices(), device, trace
        self._hooks: list[saved_tensors_hooks] = []
        self._begin_pass()

    def __enter__(self) -> CPUOffload:
        if not self._hooks:
            self._begin_pass()
        hooks = saved_tensors_hooks(self._pack, methodcaller("unpack"))
        hooks.__enter__()
        self._hooks.append(hooks)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self._hooks:
            return  # closed before: the hooks that are in force now are somebody else's
        self._hooks.pop().__exit__(kind, error, at)
        if not self._hooks and kind is None:
            self._end_pass()

    @property
    def traffic(self) -> dict[str, ActivationTraffic]:
        """What the last iteration saved, by tag."""
        return {self.tag: self._pass.traffic}

    def _begin_pass(self) -> None:
        self._history = history_of(self.tag)
        destination = Destination(self._target, self._folder, self._devices, self._device, self._history)
        self._pass = OffloadPass(ShareChoice(self.offload_ratio, self._history.sizes), destination, trace=self._trace)
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def _end_pass(self) -> None:
        self._pass.end_forward()
        if self._pass.choice.sizes:
            self._history.learn(self._pass.choice.sizes, self._storages)
            self._history.trim()

    def _pack(self, tensor: torch.Tensor) -> SavedTensor | ReferencedTensor:
        """Return what autograd is to hold in place of ``tensor``."""
        if not is_plain(tensor):
            return ReferencedTensor(tensor)
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = weakref.ref(storage)
        if is_weight(tensor):
            self._history.live_with(self.tag, tensor if tensor._base is None else tensor._base)
            return ReferencedTensor(tensor)
        key = key_of(tensor)
        span = find_span(key, tensor)
        if span is None:
            if self._history.is_constant(tensor):
                return ReferencedTensor(tensor)
            if self._pass.began_backward:  # inside the context: what is saved now is the next iteration's
                self._end_pass()
                self._begin_pass()
            is_first = self._history.sizes is None
            span = self._pass.save(
                tensor, key, stays=is_first and not tensor.requires_grad
            )  # a buffer, for all we know
            remember_span(key, span)
        return SavedTensor(tensor, span)


def _check_ratio(ratio: object) -> float:
    """Return ``ratio``; a ``ConfigError`` unless it is a number from 0 to 1."""
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1:  # nan is in no range
        raise ConfigError(
            f"offload_ratio: {ratio!r} is no share of the bytes that are saved for the backward pass; give a number"
            " from 0 (all stay) to 1 (all go)"
        )
    return float(ratio)


def _check_target(target: object, folder: str | Path | None) -> str:
    """Return ``target``; a ``ConfigError`` unless it is one of ``TARGETS``, and ``folder`` is for disk alone."""
    if target not in TARGETS:
        raise ConfigError(f"target: {target!r} is neither 'host' nor 'disk'{closest(str(target), TARGETS)}")
    if folder is not None and target != "disk":
        raise ConfigError(f"folder: {str(folder)!r} is for target='disk' alone, and the target is {target!r}")
    return str(target)


def _check_tag(tag: object) -> str:
    """Return ``tag``; a ``ConfigError`` unless it is text that isn't empty."""
    if not isinstance(tag, str) or not tag:
        raise ConfigError(f"tag: {tag!r} names nothing; give the text under which sizes are remembered, e.g. 'block'")
    return tag
