"""The field's functions for modules whose weights are offloaded: asking, bringing them in by hand, saving them.

What all of them rest on is ``offloaded_tensors``: what waits in a module, whoever sent it away.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from offstage.stages.dispatch.accelerate_api.align import AlignDevicesHook, resolve_device
from offstage.stages.dispatch.accelerate_api.hooks import hooks_of
from offstage.stages.dispatch.streaming.places import TensorPlace, place_of
from offstage.stages.dispatch.streaming.waiting_tensor import WaitingTensor, rebuild, state_on_host
from offstage.stages.empty_init.skeleton import parent
from offstage.stages.machine.devices import AnyDevice

_log = logging.getLogger(__name__)


def offloaded_tensors(module: nn.Module) -> dict[str, WaitingTensor]:
    """Return the tensors of ``module`` itself that are there for its calls only, by their names in it.

    Where a hook brings the module in as a whole, those of its submodules are among them.
    """
    bound = [*module._parameters.items(), *module._buffers.items()]
    tensors = {name: tensor for name, tensor in bound if isinstance(tensor, WaitingTensor)}
    for hook in hooks_of(module):
        if isinstance(hook, AlignDevicesHook):
            tensors |= hook.offloaded
    return tensors


def has_offloaded_params(module: nn.Module) -> bool:
    """Return whether tensors of ``module`` itself, not of its submodules, are there for its calls only.

    >>> layer = nn.Linear(2, 1)
    >>> has_offloaded_params(layer), has_offloaded_params(cpu_offload(layer, "cpu"))
    (False, True)
    """
    return bool(offloaded_tensors(module))


@contextmanager
def align_module_device(module: nn.Module, execution_device: AnyDevice | None = None) -> Iterator[None]:
    """Have the tensors of ``module`` itself, not of its submodules, on ``execution_device`` inside this context.

    Offloaded ones are brought in, by default to where the module computes, and wait again afterwards: what is written
    to them inside is kept only where they are not a copy. The module's other parameters move there and back, with what
    was written to them; without a device they stay where they are.

    >>> layer = cpu_offload(nn.Linear(2, 1, bias=False), "cpu")
    >>> with align_module_device(layer):
    ...     layer.weight.device
    device(type='cpu')
    >>> layer.weight.device
    device(type='meta')
    """
    device = resolve_device(execution_device)
    offloaded = offloaded_tensors(module)
    stays = {} if device is None else dict(module.named_parameters(recurse=False))
    aligned: list[TensorPlace] = []
    try:
        for name, waiting in offloaded.items():
            aligned.append(_bind(module, name, waiting.now(device or waiting.source.device)))
        for name, parameter in stays.items():
            if name not in offloaded and device is not None and parameter.device != device:
                aligned.append(_bind(module, name, parameter.detach().to(device)))
        yield
    finally:
        for place in reversed(aligned):
            bound, own = place.bound, place.before
            is_copy = isinstance(own, WaitingTensor) or own.is_meta
            if place.leave() and bound is not None and not (is_copy or bound.is_meta):
                own.data.copy_(bound.detach())  # what was written to it


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of ``model`` on the host, offloaded tensors read from where they wait, tied ones once.

    The host must have room for it. Tensors that are on meta and wait nowhere are left out, with a warning that lists
    them.

    >>> model = cpu_offload(nn.Sequential(nn.Linear(2, 1)), "cpu")
    >>> sorted(get_state_dict_offloaded_model(model))
    ['0.bias', '0.weight']
    """
    state = state_on_host(model)
    absent = [name for name, value in state.items() if isinstance(value, torch.Tensor) and value.is_meta]
    if absent:
        _log.warning("left out of the state dict, they are on the meta device: %s", ", ".join(map(repr, absent)))
    return {name: value for name, value in state.items() if name not in absent}


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: dict[str, Any],
    device_to_put_offload: AnyDevice = "cpu",
) -> dict[str, Any]:
    """Replace the entries of ``state_dict`` that belong to ``module`` by its tensors, and return ``state_dict``.

    ``module_name`` is the full name of one of its tensors. Offloaded tensors are read to ``device_to_put_offload``;
    others are taken where they are.

    >>> model = cpu_offload(nn.Sequential(nn.Linear(2, 1, bias=False)), "cpu")
    >>> get_state_dict_from_offload(model[0], "0.weight", {"0.weight": ""})["0.weight"].shape
    torch.Size([1, 2])
    """
    prefix = parent(module_name)
    with align_module_device(module, device_to_put_offload if has_offloaded_params(module) else None):
        for key, value in module.state_dict().items():
            name = f"{prefix}.{key}" if prefix else key
            if name in state_dict:
                state_dict[name] = value
    return state_dict


def _bind(module: nn.Module, name: str, data: torch.Tensor) -> TensorPlace:
    place = place_of(module, name)
    place.bind(rebuild(place.before, data))
    return place
