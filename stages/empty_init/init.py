"""Building a model without its weights.

Parameters are sent to the meta device as they are registered, through torch's own registration hooks, so that code
that builds a module needs no change and no method of ``nn.Module`` is replaced. Buffers keep their values by default:
rotary tables and masks are computed by constructors and stand in no checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

_FACTORIES = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn}


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Build modules inside this context with every parameter on the meta device.

    With ``include_buffers`` the buffers go there too, and so does every tensor made without a device. Modules that
    other threads build meanwhile are left alone.

    >>> with init_empty_weights():
    ...     layer = nn.Linear(100_000, 100_000)  # 40 GB that are never allocated
    >>> layer.weight.device
    device(type='meta')
    """
    with init_on_device(torch.device("meta"), include_buffers=include_buffers):
        yield


@contextmanager
def init_on_device(device: torch.device | str | int, include_buffers: bool | None = None) -> Iterator[None]:
    """Build modules inside this context with every parameter on ``device``; see ``init_empty_weights``.

    >>> with init_on_device("meta", include_buffers=True):
    ...     norm = nn.BatchNorm1d(4)
    >>> norm.running_mean.device
    device(type='meta')
    """
    device = torch.device(device)
    owner = threading.get_ident()
    # A parameter that is assigned twice stays one parameter.
    moved: MutableMapping[torch.Tensor, torch.Tensor] = WeakIdKeyDictionary()

    def send(_module: nn.Module, _name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        if threading.get_ident() != owner or tensor.device == device or is_lazy(tensor):
            return None
        if tensor not in moved:
            moved[tensor] = _on_device(tensor, device)
        result: torch.Tensor = moved[tensor]
        return result

    def send_buffer(module: nn.Module, name: str, buffer: torch.Tensor | None) -> torch.Tensor | None:
        return None if buffer is None else send(module, name, buffer)

    with ExitStack() as stack:
        if device.type == "meta":
            stack.enter_context(_TooLargeToMeta())
        stack.callback(register_module_parameter_registration_hook(send).remove)  # type: ignore[arg-type]
        if include_buffers:
            stack.enter_context(device)
            stack.callback(register_module_buffer_registration_hook(send_buffer).remove)  # type: ignore[arg-type]
        yield


class _TooLargeToMeta(TorchFunctionMode):
    """Makes a tensor on meta where the machine can't allocate it.

    A parameter is allocated, though never touched, before it can be registered: on most systems that costs nothing,
    up to the point where one tensor is larger than the machine.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if func not in _FACTORIES or "allocate memory" not in str(error):
                raise
            return func(*args, **{**kwargs, "device": "meta"})


def _on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``tensor`` on ``device``, of the same class and with the same attributes."""
    data = tensor.detach().to(device)
    if not isinstance(tensor, nn.Parameter):
        return data
    parameter = type(tensor)(data, requires_grad=tensor.requires_grad)
    parameter.__dict__.update(tensor.__dict__)
    return parameter
