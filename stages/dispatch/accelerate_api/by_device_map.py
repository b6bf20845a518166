"""Dispatching by a device map: from module and tensor names to hooks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeline.errors import ConfigError
from stages.dispatch.accelerate_api.align import AlignDevicesHook, AnyDevice, SkipKeys, TiedMap, resolve_device
from stages.dispatch.accelerate_api.attach import attach_align_device_hook_on_blocks
from stages.dispatch.accelerate_api.hooks import add_hook_to_module, remove_hook_from_submodules
from stages.dispatch.accelerate_api.offload_dir import store_weights
from stages.dispatch.streaming.guard import guard, is_guarded
from stages.empty_init import find_tied_parameters, named_module_tensors, retie_parameters
from stages.empty_init.skeleton import parent
from stages.empty_init.tied import non_persistent_buffers
from stages.shard_load import OffloadedWeightsLoader, PrefixedDataset
from stages.shard_load.checkpoint_in_model import home_of
from stages.units import CPU, DISK, DeviceId

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Dispatch:
    """What ``dispatch_model`` was asked for."""

    device_map: Mapping[str, AnyDevice]
    main_device: AnyDevice | None
    state_dict: Mapping[str, torch.Tensor] | None
    folder: Path | None
    index: Mapping[str, Mapping[str, Any]] | None
    offload_buffers: bool
    skip_keys: SkipKeys
    preload: list[str] | None

    @cached_property
    def main(self) -> AnyDevice:
        """Where offloaded weights compute: as given, or the first accelerator in the map's order, or the cpu."""
        if self.main_device is not None:
            return self.main_device
        return next((device for device in self.device_map.values() if str(device) not in (CPU, DISK)), CPU)

    def is_away(self, device: AnyDevice) -> bool:
        """Return whether weights of ``device`` are brought in for each call."""
        return str(device) == DISK or (str(device) == CPU and str(self.main) != CPU)

    def computes_on(self, device: AnyDevice) -> AnyDevice:
        """Return where a module computes whose weights are on ``device``."""
        return self.main if self.is_away(device) else device


def dispatch(model: nn.Module, wanted: Dispatch) -> nn.Module:
    """Place the weights of ``model`` and attach its hooks."""
    if is_guarded(model):
        remove_hook_from_submodules(model)
    homes = {name: home_of(name, wanted.device_map) for name in _tensor_names(model)}
    _warn_of_strangers(model, wanted)
    tied = find_tied_parameters(model)
    shared: TiedMap = {model.get_parameter(name).data_ptr(): {} for group in tied for name in group}
    shared.pop(0, None)  # on meta
    blocks, split = _blocks(model, wanted.device_map)
    loose = {name: [homes[tensor] for tensor in homes if parent(tensor) == name] for name in split}
    weights = _weights_map(model, wanted, homes=homes, loose=loose)
    attach_align_device_hook_on_blocks(
        model,
        execution_device={"": wanted.main, **{name: wanted.computes_on(device) for name, device in blocks.items()}},
        offload={name: wanted.is_away(device) for name, device in blocks.items()},
        weights_map=weights,
        offload_buffers=wanted.offload_buffers,
        skip_keys=wanted.skip_keys,
        preload_module_classes=wanted.preload,
        tied_params_map=shared,
    )
    _attach_loose(model, wanted, loose=loose, weights=weights, shared=shared)
    retie_parameters(model, tied)
    guard(model, resolve_device(wanted.main), wanted.device_map)
    return model


def _tensor_names(model: nn.Module) -> list[str]:
    """Return the names that a device map must cover: parameters, and the buffers that a state dict holds."""
    hidden = non_persistent_buffers(model)
    buffers = [name for name, _ in model.named_buffers(remove_duplicate=False) if name not in hidden]
    return [name for name, _ in model.named_parameters(remove_duplicate=False)] + buffers


def _warn_of_strangers(model: nn.Module, wanted: Dispatch) -> None:
    known = {*_tensor_names(model), *non_persistent_buffers(model), *_modules(model)}
    strangers = [name for name in wanted.device_map if name not in known]
    if strangers:
        _log.warning("device_map names nothing in the model: %s", ", ".join(strangers))
    for device in dict.fromkeys(wanted.device_map.values()):
        resolved = resolve_device(device) if str(device) != DISK else None
        if str(device) != CPU and resolved is not None and resolved.type == "cpu":
            _log.warning("device %s isn't here; it is simulated on the cpu", device)


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    return dict(model.named_modules(remove_duplicate=False))


def _blocks(model: nn.Module, device_map: Mapping[str, AnyDevice]) -> tuple[dict[str, AnyDevice], set[str]]:
    """Return the modules that lie on one device as a whole, and those whose own tensors must be looked at one by one.

    An entry of the map that has others below it is split, so that no block lies inside another.
    """
    modules, blocks, split = _modules(model), dict[str, AnyDevice](), set[str]()
    waiting = [(name, device) for name, device in device_map.items() if name in modules]
    while waiting:
        name, device = waiting.pop()
        prefix = f"{name}." if name else ""
        if any(key != name and key.startswith(prefix) for key in device_map):
            split.add(name)
            children = (f"{prefix}{child}" for child, _ in modules[name].named_children())
            waiting += [(child, device) for child in children if child not in device_map]
        else:
            blocks[name] = device
    named = {parent(name) for name in device_map if name not in modules}
    owners = {name for name in split | named if name in modules}
    return blocks, {name for name in owners if any(True for _ in named_module_tensors(modules[name]))}


def _attach_loose(
    model: nn.Module,
    wanted: Dispatch,
    *,
    loose: Mapping[str, list[DeviceId]],
    weights: Mapping[str, torch.Tensor] | None,
    shared: TiedMap,
) -> None:
    """Give modules whose own tensors the map splits a hook of their own.

    One hook is for all tensors of a module: if one of them is brought in for each call, all are.
    """
    for name, devices in loose.items():
        resident = [device for device in devices if not wanted.is_away(device)]
        offload = len(resident) < len(devices)
        hook = AlignDevicesHook(
            wanted.main if offload or not resident else resident[0],
            offload=offload,
            weights_map=PrefixedDataset(weights, f"{name}.") if weights is not None and name else weights,
            offload_buffers=wanted.offload_buffers,
            io_same_device=not name,
            skip_keys=wanted.skip_keys,
            tied_params_map=shared,
        )
        module = model.get_submodule(name)
        add_hook_to_module(module, hook, append=True)


def _weights_map(
    model: nn.Module, wanted: Dispatch, *, homes: Mapping[str, DeviceId], loose: Mapping[str, list[DeviceId]]
) -> Mapping[str, torch.Tensor] | None:
    """Return what is brought in for each call; what goes to the disk is written there now."""
    state = {name: tensor for name, tensor in model.state_dict().items() if name in homes}
    on_disk = {name: tensor for name, tensor in state.items() if homes[name] == DISK}
    split = {name for name, devices in loose.items() if any(wanted.is_away(device) for device in devices)}
    on_host = {
        name: tensor.to(CPU)
        for name, tensor in state.items()
        if name not in on_disk and (wanted.is_away(homes[name]) or parent(name) in split) and not tensor.is_meta
    }
    if on_disk and wanted.index is None:
        if wanted.folder is None:
            raise ConfigError("offload_dir: tensors are mapped to disk, and no folder is given to offload them to")
        buffers = set() if wanted.offload_buffers else {name for name, _ in model.named_buffers()}
        store_weights({name: tensor for name, tensor in on_disk.items() if name not in buffers}, wanted.folder)
    given = on_host if wanted.state_dict is None else wanted.state_dict
    if not (given or on_disk or wanted.folder):
        return None
    return OffloadedWeightsLoader(state_dict=given, save_folder=wanted.folder, index=wanted.index)
