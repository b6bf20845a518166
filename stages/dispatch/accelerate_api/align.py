"""The hook that brings a module's weights and inputs to where the module computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from offstage.stages.dispatch.accelerate_api.hooks import ModelHook
from offstage.stages.dispatch.streaming.places import TensorPlace, places_in
from offstage.stages.dispatch.streaming.waiting_tensor import (
    WaitingSource,
    WaitingTensor,
    rebuild,
    send_waiting,
)
from offstage.stages.dispatch.transfer.values import first_device, send_to_device
from offstage.stages.machine.devices import AnyDevice, torch_device
from offstage.stages.shard_load import OffloadedWeightsLoader, PrefixedDataset
from offstage.stages.units import parse_device

TiedMap = dict[int, dict[torch.device, torch.Tensor]]
SkipKeys = str | list[str] | None


@cache
def resolve_device(device: AnyDevice | None) -> torch.device | None:
    """Return the torch device behind ``0``, ``"cuda:0"``, ``"cpu"`` or a torch device.

    Where there are no accelerators, one given by its index is simulated on the cpu.
    """
    if device is None or isinstance(device, torch.device):
        return device
    try:
        device_id = parse_device(device)
    except ValueError:
        return torch.device(device)
    return torch_device(device_id)


class AlignDevicesHook(ModelHook):
    """Brings the weights of a module to its execution device, and its inputs too.

    ``execution_device``: where the module computes; None leaves inputs where they are. ``offload``: the weights are
    there during a call only, and come from ``weights_map`` (by default from the host, where they go). With
    ``offload_buffers`` persistent buffers as well, else buffers stay on the execution device. ``io_same_device``: the
    output goes back to where the first input was. ``place_submodules``: the same for the weights of all submodules.
    ``skip_keys``: keyword arguments, and keys of outputs, that are not moved. ``tied_params_map`` (address of the data
    → device → tensor) lets modules that share a weight share it on the device.

    A weight that someone binds in the place of an offloaded one, on the execution device, is left there.

    >>> layer = add_hook_to_module(nn.Linear(2, 1), AlignDevicesHook("cpu", offload=True))
    >>> layer.weight.device, layer(torch.ones(1, 2)).device
    (device(type='meta'), device(type='cpu'))
    """

    def __init__(  # the field's signature
        self,
        execution_device: AnyDevice | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, torch.Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: SkipKeys = None,
        tied_params_map: TiedMap | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}
        self.tied_pointers_to_remove: set[tuple[int, torch.device]] = set()
        self._places: list[TensorPlace] = []
        self._moved: list[TensorPlace] = []

    def __repr__(self) -> str:
        shown = ("execution_device", "offload", "io_same_device", "offload_buffers", "place_submodules", "skip_keys")
        return f"AlignDevicesHook({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    @property
    def offloaded(self) -> dict[str, WaitingTensor]:
        """The tensors that are there during a call only, by their names in the module."""
        return {place.name: place.before for place in self._places if isinstance(place.before, WaitingTensor)}

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Send the weights of ``module`` to where they wait, or to the execution device."""
        places = list(_places(module, recurse=self.place_submodules))
        self.original_devices = {place.name: place.before.device for place in places}
        offloaded = [p for p in places if self.offload and self._is_offloaded(module, p)]
        names = {place.name for place in offloaded}
        if self.offload and self.weights_map is None:
            self.weights_map = {place.name: place.before.detach().to("cpu") for place in offloaded}
        self._places, self._moved = offloaded, []
        for place in offloaded:
            self._send_away(place)
        for place in places:
            if place.name not in names:
                self._settle(place)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Bring the weights in and the inputs over."""
        if self.io_same_device:
            self.input_device = first_device((args, kwargs))
        device = resolve_device(self.execution_device)
        brought = [(place, self._fetch(place, device)) for place in self._places if self._is_away(place, device)]
        for place, tensor in brought:  # all or none: a read may fail
            place.bind(tensor)
        if device is None:
            return args, kwargs
        return send_to_device(args, device), send_to_device(kwargs, device, skip_keys=self.skip_keys)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Let the weights go, and send the output to where the input was if that is wanted."""
        self.forward_failed(module)
        if self.io_same_device and self.input_device is not None:
            output = send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Let the weights go."""
        for place in self._places:
            place.leave()
        for pointer, device in self.tied_pointers_to_remove:
            (self.tied_params_map or {}).get(pointer, {}).pop(device, None)
        self.tied_pointers_to_remove.clear()

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Put the weights back where they were: the same parameters, where their memory was kept."""
        self.forward_failed(module)
        for place in self._places:
            place.come_home()
        for place in self._moved:
            place.move(self.original_devices[place.name])
        self._places, self._moved = [], []
        return module

    def _is_offloaded(self, module: nn.Module, place: TensorPlace) -> bool:
        if isinstance(place.before, nn.Parameter):
            return True
        owner, _, attribute = place.name.rpartition(".")
        return self.offload_buffers and attribute not in module.get_submodule(owner)._non_persistent_buffers_set

    def _send_away(self, place: TensorPlace) -> None:
        assert self.weights_map is not None
        tensor = place.before
        if isinstance(tensor, WaitingTensor):
            return
        source = WaitingSource(self.weights_map, place.name, resolve_device(self.execution_device))
        keep = tensor.is_meta or _shares_memory(tensor, self.weights_map, place.name)
        place.settle(send_waiting(tensor, source, keep=keep))

    def _settle(self, place: TensorPlace) -> None:
        """Move a tensor that is not offloaded to the execution device, to stay there."""
        device, tensor = resolve_device(self.execution_device), place.before
        if device is None or tensor.device == device or isinstance(tensor, WaitingTensor):
            return
        if tensor.is_meta:
            raise ValueError(f"{place.name!r} is on the meta device and has no data to move to {device}; load it first")
        shared = (self.tied_params_map or {}).get(tensor.data_ptr())
        moved = shared.get(device) if shared is not None else None
        if moved is None:
            moved = tensor.detach().to(device)
            if shared is not None:
                shared[device] = moved
        place.settle(rebuild(tensor, moved))
        if self.offload:
            self._moved.append(place)

    def _is_away(self, place: TensorPlace, device: torch.device | None) -> bool:
        """Return whether the tensor must be brought in: it waits, or was bound by others on another device."""
        now = place.now
        if isinstance(now, WaitingTensor):
            return True
        return now is not None and now is not place.bound and device is not None and now.device != device

    def _fetch(self, place: TensorPlace, device: torch.device | None) -> torch.Tensor:
        waiting = place.before
        assert isinstance(waiting, WaitingTensor)
        assert self.weights_map is not None
        value = self.weights_map[place.name]
        shared = (self.tied_params_map or {}).get(value.data_ptr())
        if shared is None or device is None:
            return rebuild(waiting, waiting.moved(value, device))
        if device not in shared:
            shared[device] = waiting.moved(value, device)
            self.tied_pointers_to_remove.add((value.data_ptr(), device))
        return rebuild(waiting, shared[device])


def _places(module: nn.Module, *, recurse: bool) -> Iterator[TensorPlace]:
    for prefix, owner in module.named_modules() if recurse else [("", module)]:
        yield from places_in(owner, prefix)


def _shares_memory(tensor: torch.Tensor, weights: Mapping[str, torch.Tensor], name: str) -> bool:
    """Return whether ``weights[name]`` is this very tensor's memory; nothing is read from disk to find out."""
    if isinstance(weights, PrefixedDataset):
        return _shares_memory(tensor, weights.dataset, f"{weights.prefix}{name}")
    if isinstance(weights, OffloadedWeightsLoader):
        return _shares_memory(tensor, weights.state_dict, name)
    weight = weights.get(name) if isinstance(weights, dict) else None
    return weight is not None and weight.device == tensor.device and weight.data_ptr() == tensor.data_ptr()
