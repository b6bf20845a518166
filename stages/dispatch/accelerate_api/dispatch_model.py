"""Whole models whose weights lie on several devices, by one call.

Names, signatures and behaviour are those that scripts written against accelerate know. They differ where today's
behaviour hurts: a device map may name single tensors, the main device is the first accelerator in the map's order, tied
weights stay one tensor, and files in an offload folder are compared with weights that are in memory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeline.errors import ConfigError
from stages.dispatch.accelerate_api.align import AlignDevicesHook, AnyDevice, SkipKeys, resolve_device
from stages.dispatch.accelerate_api.attach import attach_align_device_hook
from stages.dispatch.accelerate_api.by_device_map import Dispatch, dispatch
from stages.dispatch.accelerate_api.hooks import add_hook_to_module
from stages.dispatch.accelerate_api.offload_dir import store_weights
from stages.dispatch.streaming.guard import guard
from stages.plan import get_balanced_memory, infer_auto_device_map
from stages.shard_load import OffloadedWeightsLoader, load_checkpoint_in_model
from stages.units import CPU, DISK

PathLike = str | os.PathLike[str]
_POLICIES = ("auto", "balanced", "balanced_low_0", "sequential")


def dispatch_model(  # the field's signature
    model: nn.Module,
    device_map: Mapping[str, AnyDevice],
    main_device: AnyDevice | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: PathLike | None = None,
    offload_index: Mapping[str, Mapping[str, Any]] | None = None,
    offload_buffers: bool = False,
    skip_keys: SkipKeys = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Place the weights of ``model`` as ``device_map`` says (module or tensor name → device) and return the model.

    Weights on ``cpu`` (where the main device is an accelerator) and on ``disk`` come to ``main_device`` for each call
    of their module; it is by default the first accelerator of the map, or the cpu. ``state_dict`` has those of the
    host if not the model itself; those of the disk are in ``offload_dir`` or where ``offload_index`` says, and are
    written to ``offload_dir`` if it lacks them. ``preload_module_classes`` names modules that are brought in as a
    whole. A map of one device moves the model there, without hooks unless ``force_hooks``. By default the
    ``skip_keys`` are those that a transformers model declares. The map is kept as ``model.hf_device_map``; a model
    with offloaded weights refuses to be moved.

    Raises ``ConfigError`` where the map leaves out a tensor, or there is nowhere to offload to.
    """
    declared: SkipKeys = getattr(model, "_skip_keys_device_placement", None)
    wanted = Dispatch(
        device_map=dict(device_map),
        main_device=main_device,
        state_dict=state_dict,
        folder=None if offload_dir is None else Path(offload_dir),
        index=offload_index,
        offload_buffers=offload_buffers,
        skip_keys=declared if skip_keys is None else skip_keys,
        preload=preload_module_classes,
    )
    devices = {str(device) for device in device_map.values()}
    if len(devices) > 1 or DISK in devices or force_hooks:
        return dispatch(model, wanted)
    model.to(resolve_device(wanted.main))
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    return model


def load_checkpoint_and_dispatch(  # the field's signature
    model: nn.Module,
    checkpoint: PathLike,
    device_map: str | Mapping[str, AnyDevice] | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: list[str] | None = None,
    offload_folder: PathLike | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: SkipKeys = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> nn.Module:
    """Load ``checkpoint`` into ``model`` as ``device_map`` says, and dispatch it; see the two functions that do.

    The map may be the name of a policy (``auto``, ``balanced``, ``balanced_low_0``, ``sequential``), which then places
    the weights within ``max_memory``. Without a map the weights are loaded to the host and nothing is dispatched.
    ``full_state_dict`` changes nothing: every process loads for itself, and can't have it broadcast.
    """
    if broadcast_from_rank0:
        raise ConfigError("broadcast_from_rank0: True is not supported; every process loads what it needs itself")
    if isinstance(device_map, str):
        device_map = _map_by_policy(
            model, device_map, max_memory=max_memory, no_split=no_split_module_classes, dtype=dtype
        )
    on_disk = device_map is not None and DISK in {str(device) for device in device_map.values()}
    load_checkpoint_in_model(
        model,
        checkpoint,
        device_map=device_map,
        offload_folder=offload_folder,
        dtype=dtype,
        offload_state_dict=on_disk if offload_state_dict is None else offload_state_dict,
        offload_buffers=offload_buffers,
        strict=strict,
    )
    if device_map is None:
        return model
    return dispatch_model(
        model,
        device_map,
        offload_dir=offload_folder,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
    )


def cpu_offload(
    model: nn.Module,
    execution_device: AnyDevice | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep the weights of ``model`` on the host, bring each to ``execution_device`` for its calls, return the model.

    The device is by default where the first parameter is. ``state_dict`` has the weights if not the model itself.
    """
    weights = {n: t.detach().to(CPU) for n, t in model.state_dict().items()} if state_dict is None else state_dict
    return _offload_all(
        model, weights, device=execution_device, buffers=offload_buffers, preload=preload_module_classes
    )


def disk_offload(
    model: nn.Module,
    offload_dir: PathLike,
    execution_device: AnyDevice | None = None,
    offload_buffers: bool = False,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep the weights of ``model`` in ``offload_dir``, bring each to ``execution_device`` for its calls.

    Weights that the folder already has are not written again; those of the model are, where they differ.
    """
    store_weights(model.state_dict(), Path(offload_dir))
    weights = OffloadedWeightsLoader(save_folder=offload_dir)
    return _offload_all(
        model, weights, device=execution_device, buffers=offload_buffers, preload=preload_module_classes
    )


def _offload_all(
    model: nn.Module,
    weights: Mapping[str, torch.Tensor],
    *,
    device: AnyDevice | None,
    buffers: bool,
    preload: list[str] | None,
) -> nn.Module:
    first = next(model.parameters(), None)
    target = resolve_device(device) or (first.device if first is not None else torch.device(CPU))
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True), append=True)
    attach_align_device_hook(
        model,
        execution_device=target,
        offload=True,
        offload_buffers=buffers,
        weights_map=weights,
        preload_module_classes=preload,
    )
    guard(model, target)
    return model


def _map_by_policy(
    model: nn.Module, policy: str, *, max_memory: Any, no_split: list[str] | None, dtype: str | torch.dtype | None
) -> dict[str, AnyDevice]:
    if policy not in _POLICIES:
        raise ConfigError(f"device_map: {policy!r} is no policy; give one of {', '.join(_POLICIES)}, or a map")
    if policy != "sequential":
        max_memory = get_balanced_memory(
            model,
            max_memory=max_memory,
            no_split_module_classes=no_split,
            dtype=dtype,
            low_zero=policy == "balanced_low_0",
        )
    found = infer_auto_device_map(model, max_memory=max_memory, no_split_module_classes=no_split, dtype=dtype)
    return dict(found)
