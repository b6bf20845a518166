"""Streaming: offloaded weights are brought in for each use and let go after it.

Built on torch's native module hooks, so ``forward`` is never replaced and removing the hooks leaves the module as it
was. A release hook is called even when the forward raises.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stages.dispatch.moving import first_device, send_to_device
from stages.dispatch.score import Score
from stages.units import DeviceId


@dataclass(slots=True)
class Traffic:
    """What streaming has cost so far.

    Bytes brought in, those of them that waited on disk, and the seconds that forwards waited for weights.
    """

    streamed_bytes: int = 0
    storage_bytes: int = 0
    stall_seconds: float = 0.0


@dataclass(slots=True)
class _Slot:
    """One streamed tensor: the table of its module that it is bound in, its short name, and what waits there."""

    name: str
    table: dict[str, Any]
    attribute: str
    waiting: torch.Tensor


@dataclass(slots=True)
class _Part:
    """The streamed tensors of one module, and how many running calls use them."""

    slots: list[_Slot]
    device: torch.device
    users: int = 0


class Streamer:
    """The hooks of one dispatched model.

    ``offloaded`` reads a tensor that waits on disk, each time it is asked; what waits on the host is in the model.
    ``torch_device`` gives the torch device behind a device id.
    """

    def __init__(
        self,
        model: nn.Module,
        score: Score,
        *,
        offloaded: Mapping[str, torch.Tensor],
        torch_device: Callable[[DeviceId], torch.device],
    ) -> None:
        self.traffic = Traffic()
        self._offloaded = offloaded
        self._stack = ExitStack()
        main = torch_device(score.main_device)
        if main.type != "cpu":
            self._move_inputs(model, {name: torch_device(device) for name, device in score.entries.items()})
        for part in score.parts.values():
            if part.streamed:
                slots = [_slot(model, tensor) for tensor in part.streamed]
                self._stream(model, _Part(slots, torch_device(part.execution)), callers=part.callers)

    def remove(self) -> None:
        """Take all hooks off the model; its streamed weights wait where they did."""
        self._stack.close()

    def _stream(self, model: nn.Module, part: _Part, *, callers: tuple[str, ...]) -> None:
        """Bring ``part`` in before, and let it go after, each call of the modules ``callers``."""

        def acquire(_module: nn.Module, _args: Any) -> None:
            self._acquire(part)

        def release(_module: nn.Module, _args: Any, _output: Any) -> None:
            self._release(part)

        for caller in callers:
            module = model.get_submodule(caller)
            self._stack.callback(module.register_forward_pre_hook(acquire, prepend=True).remove)
            self._stack.callback(module.register_forward_hook(release, always_call=True).remove)

    def _acquire(self, part: _Part) -> None:
        if part.users == 0:
            began = time.perf_counter()
            tensors = [self._fetch(slot, part.device) for slot in part.slots]  # all or none: a read may fail
            for slot, tensor in zip(part.slots, tensors, strict=True):
                slot.table[slot.attribute] = tensor
            self.traffic.stall_seconds += time.perf_counter() - began
        part.users += 1

    def _release(self, part: _Part) -> None:
        """Let ``part`` go when its last user leaves; a call whose acquire failed has nothing to release."""
        part.users = max(part.users - 1, 0)
        if part.users == 0:
            for slot in part.slots:
                slot.table[slot.attribute] = slot.waiting

    def _fetch(self, slot: _Slot, device: torch.device) -> torch.Tensor:
        stored = slot.waiting.device.type == "meta"
        tensor = (self._offloaded[slot.name] if stored else slot.waiting).to(device)
        self.traffic.streamed_bytes += tensor.nbytes
        self.traffic.storage_bytes += tensor.nbytes if stored else 0
        return nn.Parameter(tensor, requires_grad=False) if isinstance(slot.waiting, nn.Parameter) else tensor

    def _move_inputs(self, model: nn.Module, entries: Mapping[str, torch.device]) -> None:
        """Move the inputs of each entry to its device, and the model's output to where its input was."""
        skip = set(getattr(model, "_skip_keys_device_placement", None) or ())

        def align(device: torch.device) -> Callable[..., tuple[Any, Any]]:
            return lambda _module, args, kwargs: (
                send_to_device(args, device, skip_keys=skip),
                send_to_device(kwargs, device, skip_keys=skip),
            )

        def return_home(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            home = first_device((args, kwargs))
            return output if home is None else send_to_device(output, home, skip_keys=skip)

        for name, device in entries.items():
            module = model.get_submodule(name)
            self._stack.callback(module.register_forward_pre_hook(align(device), with_kwargs=True).remove)
        self._stack.callback(model.register_forward_hook(return_home, with_kwargs=True).remove)


def _slot(model: nn.Module, name: str) -> _Slot:
    owner, _, attribute = name.rpartition(".")
    module = model.get_submodule(owner)
    table: dict[str, Any] = module._parameters if attribute in module._parameters else module._buffers
    return _Slot(name, table, attribute, table[attribute])


def pin_device(model: nn.Module, device: torch.device) -> None:
    """Make ``model.device`` the main device, also where the first parameter is streamed and waits on meta.

    Only models that have such a property are touched: they get a subclass of their class, of the same name.
    """
    kind = type(model)
    if isinstance(getattr(kind, "device", None), property):
        body = {"device": property(lambda self: device), "__module__": kind.__module__, "__doc__": kind.__doc__}
        model.__class__ = type(kind.__name__, (kind,), body)
