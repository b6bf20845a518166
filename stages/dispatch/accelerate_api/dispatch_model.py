"""Whole models whose weights lie on several devices, by one call.

Names and signatures are those that scripts written against accelerate know; the engine is the pipeline's own. They
differ where today's behaviour hurts: a device map may name single tensors, the main device is the first accelerator in
the map's order, tied weights stay one tensor, files in an offload folder are compared with weights that are in memory,
and what lies in safetensors files is streamed from there, with no second copy.

Gradients pass through streamed weights; their own are lost with them, so freeze what is streamed. On the host the
staging memory that they are brought into is what ``max_memory`` leaves, else room for the largest streamed layer twice;
on an accelerator it is room for the largest streamed layer. A layer is a module that the model declares as not to be
split, or one without children.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offstage.pipeline.errors import ConfigError
from offstage.stages.checkpoints.checkpoint import open_checkpoint
from offstage.stages.dispatch.accelerate_api.align import SkipKeys, resolve_device
from offstage.stages.dispatch.accelerate_api.hooks import remove_hook_from_submodules
from offstage.stages.dispatch.accelerate_api.offload_dir import locate_weights
from offstage.stages.dispatch.accelerate_api.streamed_model import Wanted, plan_for, stream
from offstage.stages.dispatch.streaming.guard import is_guarded
from offstage.stages.empty_init.describe import describe
from offstage.stages.empty_init.skeleton import Skeleton
from offstage.stages.machine.devices import AnyDevice, device_id
from offstage.stages.plan.functions import map_by_policy
from offstage.stages.plan.placement import Budgets
from offstage.stages.shard_load.checkpoint_match import prepare
from offstage.stages.shard_load.functions import fill_model, homes_of, load_checkpoint_in_model, with_dtype
from offstage.stages.shard_load.sources import find_sources
from offstage.stages.units import CPU, DISK, DeviceId

PathLike = str | os.PathLike[str]
_log = logging.getLogger(__name__)


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

    Weights on ``cpu`` (where the main device is an accelerator) and on ``disk`` are streamed to ``main_device``, ahead
    of the calls of their modules; it is by default the first accelerator of the map, or the cpu. ``state_dict`` has
    those of the host if not the model itself; those of the disk are in ``offload_dir`` or where ``offload_index`` says,
    and are written to ``offload_dir`` if it lacks them. ``preload_module_classes`` names modules that are brought in as
    a whole. A map of one device moves the model there, without hooks unless ``force_hooks``. By default the
    ``skip_keys`` are those that a transformers model declares. The map is kept as ``model.hf_device_map``; a model
    with offloaded weights refuses to be moved.

    Raises ``ConfigError`` where the map leaves out a tensor, or there is nowhere to offload to.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    >>> model = dispatch_model(model, {"0": "cpu", "1": "disk"}, offload_dir=folder)
    >>> model[1].weight.device, model(torch.ones(1, 2)).shape
    (device(type='meta'), torch.Size([1, 1]))
    """
    devices = {str(device) for device in device_map.values()}
    if len(devices) == 1 and DISK not in devices and not force_hooks:
        homes_of(describe(model, rehearsed=False), device_map, otherwise=CPU)
        model.to(resolve_device(main_device or next(iter(device_map.values()))))
        model.hf_device_map = dict(device_map)  # type: ignore[assignment]
        return model
    if is_guarded(model):
        remove_hook_from_submodules(model)
    skeleton = describe(model, rehearsed=False)
    wanted = _wanted(
        model,
        skeleton,
        device_map,
        buffers=offload_buffers,
        skip_keys=skip_keys,
        preload=preload_module_classes,
        main=main_device,
    )
    plan = plan_for(skeleton, wanted)
    folder = None if offload_dir is None else Path(offload_dir)
    stored = locate_weights(model, skeleton, plan, folder=folder, index=offload_index)
    stream(model, skeleton, plan, wanted, stored=stored, weights=state_dict)
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

    The map may be the name of a policy (``optimal``, ``auto``, ``balanced``, ``balanced_low_0``, ``sequential``), which
    then places the weights within ``max_memory``; without that, within what the machine can give beside a request of
    one sequence of 512 tokens, cgroups included. Without a map the weights are loaded to the host and nothing is
    dispatched. What lies on disk is streamed from the checkpoint's own files where they are safetensors of the dtype
    that is wanted; ``offload_folder`` is needed only for what isn't. ``full_state_dict`` changes nothing: every process
    loads for itself, and can't have it broadcast.

    >>> with init_empty_weights():
    ...     model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint), dtype=torch.bfloat16)
    >>> model = load_checkpoint_and_dispatch(model, checkpoint, "optimal", max_memory={"cpu": "3MB"})
    >>> sorted(set(model.hf_device_map.values()))
    ['cpu', 'disk']
    """
    if broadcast_from_rank0:
        raise ConfigError("broadcast_from_rank0: True is not supported; every process loads what it needs itself")
    if device_map is None:
        load_checkpoint_in_model(
            model, checkpoint, dtype=dtype, offload_state_dict=bool(offload_state_dict), strict=strict
        )
        return model
    budgets: Budgets = {}
    if isinstance(device_map, str):
        device_map, budgets = map_by_policy(
            model, device_map, max_memory=max_memory, no_split=no_split_module_classes, dtype=dtype
        )
    skeleton = with_dtype(describe(model, no_split=no_split_module_classes, rehearsed=False), dtype, ())
    wanted = _wanted(
        model,
        skeleton,
        device_map,
        buffers=offload_buffers,
        skip_keys=skip_keys,
        preload=preload_module_classes,
        budgets=budgets,
    )
    plan = plan_for(skeleton, wanted)
    load = prepare(model, skeleton, checkpoint=open_checkpoint(Path(checkpoint)), strict=strict, partial=not strict)
    sources = find_sources(load, plan.loading)
    any_on_disk = any(source.home == DISK for source in sources.values())
    spills = any_on_disk if offload_state_dict is None else offload_state_dict
    placed = fill_model(load, sources, None if offload_folder is None else Path(offload_folder), spills=spills)
    if plan.serving or len(set(device_map.values())) > 1 or force_hooks:
        stream(model, skeleton, plan, wanted, stored=placed.offloaded)
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    return model


def _wanted(
    model: nn.Module,
    skeleton: Skeleton,
    device_map: Mapping[str, AnyDevice],
    *,
    buffers: bool,
    skip_keys: SkipKeys,
    preload: list[str] | None,
    main: AnyDevice | None = None,
    budgets: Budgets | None = None,
) -> Wanted:
    """Return what a caller's map and options come to."""
    first = next((device for device in device_map.values() if str(device) not in (CPU, DISK)), CPU)
    main = device_id(first if main is None else main)
    declared: SkipKeys = getattr(model, "_skip_keys_device_placement", None)
    _warn_of_strangers(skeleton, device_map)
    return Wanted(
        homes_of(skeleton, device_map, otherwise=main),
        main,
        offload_buffers=buffers,
        preload=preload or (),
        skip_keys=declared if skip_keys is None else skip_keys,
        budgets=budgets or {},
    )


def _warn_of_strangers(skeleton: Skeleton, device_map: Mapping[str, AnyDevice]) -> None:
    """Say in the log which names of the map are not in the model, and which of its devices are not here."""
    names = {spec.name for spec in skeleton.tensors} | {module.name for module in skeleton.modules}
    strangers = [name for name in device_map if name not in names]
    if strangers:
        _log.warning("device_map names nothing in the model: %s", ", ".join(strangers))
    for device in dict.fromkeys(device_map.values()):
        resolved = resolve_device(device) if str(device) != DISK else None
        if str(device) != CPU and resolved is not None and resolved.type == "cpu":
            _log.warning("device %s isn't here; it is simulated on the cpu", device)


def cpu_offload(
    model: nn.Module,
    execution_device: AnyDevice | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep the weights of ``model`` on the host, bring each to ``execution_device`` for its calls, return the model.

    The device is by default where the first parameter is. ``state_dict`` has the weights if not the model itself.

    >>> model = cpu_offload(nn.Sequential(nn.Linear(2, 1)), "cpu")
    >>> model[0].weight.device, model(torch.ones(1, 2)).shape
    (device(type='meta'), torch.Size([1, 1]))
    """
    return _offload_all(
        model,
        CPU,
        device=execution_device,
        buffers=offload_buffers,
        preload=preload_module_classes,
        weights=state_dict,
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

    >>> model = disk_offload(nn.Sequential(nn.Linear(2, 1)), folder, "cpu")
    >>> model[0].weight.device, model(torch.ones(1, 2)).shape
    (device(type='meta'), torch.Size([1, 1]))
    """
    return _offload_all(
        model,
        DISK,
        device=execution_device,
        buffers=offload_buffers,
        preload=preload_module_classes,
        folder=Path(offload_dir),
    )


def _offload_all(
    model: nn.Module,
    home: DeviceId,
    *,
    device: AnyDevice | None,
    buffers: bool,
    preload: list[str] | None,
    folder: Path | None = None,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> nn.Module:
    """Have every weight of ``model`` wait on ``home``."""
    if is_guarded(model):
        remove_hook_from_submodules(model)
    first = next(model.parameters(), None)
    here = torch.device(CPU) if first is None else first.device
    skeleton = describe(model, rehearsed=False)
    wanted = Wanted(
        {spec.name: home for spec in skeleton.tensors},
        device_id(here if device is None else device),
        kept_apart=True,
        offload_buffers=buffers,
        preload=preload or (),
    )
    plan = plan_for(skeleton, wanted)
    stored = locate_weights(model, skeleton, plan, folder=folder)
    stream(model, skeleton, plan, wanted, stored=stored, weights=weights)
    return model
