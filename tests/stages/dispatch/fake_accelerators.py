"""Accelerators that aren't there, on which tensors know where they lie: an operator that mixes devices is an error.

Torch's fake tensors say of every operator on which device its result would be. Torch built without accelerators refuses
to index one on such a device from Python, or to copy it, though it can by its operators: these are called instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

aten: Any = torch.ops.aten


class ByOperators(TorchFunctionMode):
    """Indexes and copies tensors by operators."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            return _index(*args)
        if func is torch.Tensor.contiguous:
            return aten.clone(args[0], memory_format=torch.contiguous_format)
        return func(*args, **(kwargs or {}))


def _index(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    entries = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(entry, torch.Tensor) for entry in entries):
        selection: torch.Tensor = aten.index(tensor, [e if isinstance(e, torch.Tensor) else None for e in entries])
        return selection
    if Ellipsis in entries:
        place, named = entries.index(Ellipsis), sum(entry is not None and entry is not Ellipsis for entry in entries)
        entries[place : place + 1] = [slice(None)] * (tensor.dim() - named)
    dim = 0
    for entry in entries:
        if entry is None:
            tensor, dim = tensor.unsqueeze(dim), dim + 1
        elif isinstance(entry, slice):
            tensor, dim = aten.slice(tensor, dim, entry.start, entry.stop, entry.step or 1), dim + 1
        else:
            tensor = tensor.select(dim, entry)
    return tensor


@contextmanager
def fake_accelerators() -> Iterator[None]:
    """Have all tensors that are made inside be fake, on whichever devices."""
    with FakeTensorMode(allow_non_fake_inputs=True), ByOperators(), torch.no_grad():
        yield


def place(model: nn.Module, device_of: Callable[[str], torch.device]) -> None:
    """Have each tensor of ``model`` lie where its module computes."""
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                fake = torch.empty(parameter.shape, dtype=parameter.dtype, device=device_of(name))
                module._parameters[key] = nn.Parameter(fake, requires_grad=False)
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device_of(name))
