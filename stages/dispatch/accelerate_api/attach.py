"""Attaching hooks to a whole module tree."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from offstage.stages.dispatch.accelerate_api.align import AlignDevicesHook, SkipKeys, TiedMap
from offstage.stages.dispatch.accelerate_api.hooks import add_hook_to_module
from offstage.stages.empty_init import named_module_tensors
from offstage.stages.machine.devices import AnyDevice
from offstage.stages.shard_load import PrefixedDataset


@dataclass(frozen=True, slots=True)
class _Wish:
    """What all the hooks of one tree have in common, and the device of those being attached."""

    execution_device: AnyDevice | None
    weights_map: Mapping[str, torch.Tensor] | None
    offload_buffers: bool
    skip_keys: SkipKeys
    preload: Collection[str]
    tied_params_map: TiedMap | None

    def hook(self, **options: Any) -> AlignDevicesHook:
        return AlignDevicesHook(
            self.execution_device, skip_keys=self.skip_keys, tied_params_map=self.tied_params_map, **options
        )


def attach_align_device_hook(  # the field's signature
    module: nn.Module,
    execution_device: torch.device | None = None,
    offload: bool = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: SkipKeys = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedMap | None = None,
) -> None:
    """Give every submodule of ``module`` that holds tensors directly a hook that brings it to ``execution_device``.

    With ``offload`` its weights are there during its calls only, and come from ``weights_map``, whose names start
    with ``module_name``. Modules of the classes ``preload_module_classes`` are brought in as a whole, and so is torch's
    own attention, which never calls its child.

    >>> model = nn.Sequential(nn.Linear(2, 1))
    >>> attach_align_device_hook(model, "cpu", offload=True, weights_map=model.state_dict())
    >>> model[0].weight.device, model(torch.ones(1, 2)).shape
    (device(type='meta'), torch.Size([1, 1]))
    """
    preload = preload_module_classes or ()
    wish = _Wish(execution_device, weights_map, offload_buffers, skip_keys, preload, tied_params_map)
    _align(module, wish, offload=offload, name=module_name)


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: AnyDevice,
    skip_keys: SkipKeys = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedMap | None = None,
) -> None:
    """Give ``module`` and its submodules that hold tensors, and have no hook, one that brings inputs to the device.

    Submodules of the classes ``preload_module_classes`` get one for themselves as a whole.

    >>> model = nn.Sequential(nn.Linear(2, 1))
    >>> attach_execution_device_hook(model, "cpu")
    >>> model(torch.ones(1, 2)).shape
    torch.Size([1, 1])
    """
    preload = preload_module_classes or ()
    _move_inputs(module, _Wish(execution_device, None, False, skip_keys, preload, tied_params_map))


def attach_align_device_hook_on_blocks(  # the field's signature
    module: nn.Module,
    execution_device: AnyDevice | Mapping[str, AnyDevice] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: SkipKeys = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedMap | None = None,
) -> None:
    """Give the blocks of ``module`` that ``execution_device`` names hooks that bring them to the devices it gives.

    ``offload`` says which blocks are there during their calls only. One value in place of a mapping is for ``module``
    as a whole. The output of the whole goes back to where its input was.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    >>> where, waits = {"0": "cpu", "1": "cpu"}, {"0": False, "1": True}
    >>> attach_align_device_hook_on_blocks(model, where, offload=waits, weights_map=model.state_dict())
    >>> model[0].weight.device, model[1].weight.device
    (device(type='cpu'), device(type='meta'))
    """
    preload = preload_module_classes or ()
    wish = _Wish(None, weights_map, offload_buffers, skip_keys, preload, tied_params_map)
    if not isinstance(execution_device, Mapping) and not isinstance(offload, Mapping):
        wish = replace(wish, execution_device=execution_device)
        if offload:
            _align(module, wish, offload=True, name=module_name)
        else:
            add_hook_to_module(module, wish.hook(io_same_device=True, place_submodules=True), append=True)
        return
    devices, away = _per_block(execution_device, offload)
    _attach_blocks(module, wish, name=module_name, devices=devices, away=away)


def _per_block(devices: Any, away: Any) -> tuple[Mapping[str, AnyDevice], Mapping[str, bool]]:
    """Return both as mappings: what is one value holds for every block that the other one names."""
    if not isinstance(devices, Mapping):
        devices = dict.fromkeys(away, devices)
    if not isinstance(away, Mapping):
        away = dict.fromkeys(devices, away)
    return devices, away


def _attach_blocks(
    module: nn.Module, wish: _Wish, *, name: str, devices: Mapping[str, AnyDevice], away: Mapping[str, bool]
) -> None:
    here = replace(wish, execution_device=devices.get(name))
    if name in devices and name in away:
        _attach_block(module, here, name=name, offload=away[name])
    elif name == "":
        add_hook_to_module(module, here.hook(io_same_device=True), append=True)
    for child_name, child in module.named_children():
        _attach_blocks(child, wish, name=_join(name, child_name), devices=devices, away=away)


def _attach_block(module: nn.Module, wish: _Wish, *, name: str, offload: bool) -> None:
    is_root = name == ""
    if offload:
        _align(module, wish, offload=True, name=name)
        if not hasattr(module, "_hf_hook"):
            add_hook_to_module(module, wish.hook(io_same_device=is_root))
    else:
        add_hook_to_module(module, wish.hook(io_same_device=is_root, place_submodules=True), append=True)
    _move_inputs(module, wish)


def _align(module: nn.Module, wish: _Wish, *, offload: bool, name: str) -> None:
    whole = offload and (type(module).__name__ in wish.preload or isinstance(module, nn.MultiheadAttention))
    if whole or any(True for _ in named_module_tensors(module)):
        weights = wish.weights_map
        if weights is not None and name:
            weights = PrefixedDataset(weights, f"{name}.")
        hook = wish.hook(
            offload=offload, weights_map=weights, offload_buffers=wish.offload_buffers, place_submodules=whole
        )
        add_hook_to_module(module, hook, append=True)
    if not whole:
        for child_name, child in module.named_children():
            _align(child, wish, offload=offload, name=_join(name, child_name))


def _move_inputs(module: nn.Module, wish: _Wish) -> None:
    if not hasattr(module, "_hf_hook") and any(True for _ in named_module_tensors(module, recurse=True)):
        add_hook_to_module(module, wish.hook())
    if type(module).__name__ not in wish.preload:
        for child in module.children():
            _move_inputs(child, wish)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
