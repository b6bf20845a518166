"""The field's functions for single tensors of a module: putting one on a device, taking offloaded ones back.

Names and signatures are those that scripts written against accelerate know.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from offstage.pipeline.errors import ConfigError
from offstage.stages.checkpoints.dtypes import dtype_name
from offstage.stages.empty_init.skeleton import parent
from offstage.stages.empty_init.tied import find_tied_parameters, retie_parameters
from offstage.stages.machine.devices import AnyDevice
from offstage.stages.shard_load.offload_folder import OffloadedWeightsLoader

TiedMap = dict[int, dict[Any, torch.Tensor]]


def set_module_tensor_to_device(  # the field's signature
    module: nn.Module,
    tensor_name: str,
    device: AnyDevice,
    value: torch.Tensor | None = None,
    dtype: torch.dtype | str | None = None,
    fp16_statistics: torch.Tensor | None = None,
    tied_params_map: TiedMap | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Put one parameter or buffer of ``module`` on ``device``, with ``value`` as its new value if that is given.

    A float is cast to ``dtype``; without it a new value takes the dtype that the tensor has. A parameter requires
    gradients as before, and one that is there already stays the same object. ``tied_params_map`` (address of the data
    → device → tensor) makes tensors that share their data share it on the new device as well. After a move to an
    accelerator the memory that torch keeps there for later is given back, unless ``clear_cache`` is False.

    A tensor on meta that gets no value, and a value of another shape, are a ``ValueError``; ``fp16_statistics``, which
    belong to weights of 8 bits, a ``ConfigError``.
    """
    if fp16_statistics is not None:
        raise ConfigError("fp16_statistics: weights of 8 bits are not supported; leave it out")
    owner, attribute = module.get_submodule(parent(tensor_name)), tensor_name.rpartition(".")[2]
    old = owner._parameters.get(attribute, owner._buffers.get(attribute))
    target = torch.device(device)
    if old is None:
        raise ValueError(f"{tensor_name!r} is no parameter or buffer of {type(module).__name__}")
    _check_value(tensor_name, old=old, value=value, target=target)
    shared = _shared(tied_params_map, [tensor for tensor in (value, old) if tensor is not None])
    if device not in shared:
        source = old.detach() if value is None else value.detach()
        moved = source.to(target, _dtype(source, old, dtype, given=value is not None), non_blocking=non_blocking)
        if value is None and moved is source:
            return
        shared[device] = _like(old, moved, is_parameter=attribute in owner._parameters)
    _bind(owner, attribute, shared[device])
    if clear_cache and target.type not in ("cpu", "meta"):
        torch.accelerator.empty_cache()


def load_offloaded_weights(
    model: nn.Module, index: Mapping[str, Mapping[str, Any]] | None, offload_folder: str | os.PathLike[str]
) -> None:
    """Put the tensors that ``index`` names, and that lie in ``offload_folder``, into ``model``, on the cpu.

    They take the dtypes that the model has, and tied ones stay tied. Statistics of weights of 8 bits (``SCB``) are a
    ``ConfigError``.
    """
    entries = index or {}
    statistics = [name for name in entries if name.rpartition(".")[2] == "SCB"]
    if statistics:
        raise ConfigError(
            f"index: {statistics[0]!r} belongs to weights of 8 bits, which are not supported; load others"
        )
    tied = find_tied_parameters(model)
    weights = OffloadedWeightsLoader(save_folder=offload_folder, index=entries)
    for name in entries:
        set_module_tensor_to_device(model, name, "cpu", value=weights[name])
    retie_parameters(model, [sorted(group, key=lambda name: name not in entries) for group in tied])


def torch_type(dtype: torch.dtype | str) -> torch.dtype:
    """Return ``dtype``, which may be given by its name, with or without ``torch.``."""
    found = getattr(torch, dtype_name(dtype), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype: {dtype!r} is no dtype of torch; give e.g. 'bfloat16'")
    return found


def _check_value(name: str, *, old: torch.Tensor, value: torch.Tensor | None, target: torch.device) -> None:
    if value is None and old.is_meta and target.type != "meta":
        raise ValueError(f"{name!r} is on the meta device and has no data to move to {target}; give a value")
    if value is not None and value.shape != old.shape:
        raise ValueError(f"{name!r} has shape {list(old.shape)}, and the value {list(value.shape)}")


def _shared(tied: TiedMap | None, tensors: list[torch.Tensor]) -> dict[Any, torch.Tensor]:
    """Return what the map has by device for the first of ``tensors`` that it knows; an empty dict for none."""
    pointers = [tensor.data_ptr() for tensor in tensors if not tensor.is_meta]
    return next((tied[pointer] for pointer in pointers if tied and pointer in tied), {})


def _dtype(source: torch.Tensor, old: torch.Tensor, dtype: torch.dtype | str | None, *, given: bool) -> torch.dtype:
    if dtype is None:
        return old.dtype if given else source.dtype
    return torch_type(dtype) if source.is_floating_point() else source.dtype


def _like(old: torch.Tensor, data: torch.Tensor, *, is_parameter: bool) -> torch.Tensor:
    return nn.Parameter(data, requires_grad=old.requires_grad) if is_parameter else data


def _bind(owner: nn.Module, attribute: str, tensor: torch.Tensor) -> None:
    before = owner._parameters.get(attribute)
    if before is None:
        owner._buffers[attribute] = tensor
    else:
        owner._parameters[attribute] = (
            tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, before.requires_grad)
        )
