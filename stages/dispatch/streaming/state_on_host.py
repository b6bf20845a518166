"""The state dict of a model some of whose tensors wait, with the data of all."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from offstage.stages.dispatch.streaming.waiting_tensor import WaitingTensor


def state_on_host(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of ``model`` on the host, what waits read from where it waits, tied tensors once.

    The host must have room for it. Tensors that are on meta and wait nowhere stay there.
    """
    read: dict[int, torch.Tensor] = {}
    return {name: _on_host(value, read) for name, value in model.state_dict().items()}


def _on_host(value: Any, read: dict[int, torch.Tensor]) -> Any:
    """Return an entry of a state dict on the host, or as it is if it has no data; ``read`` has what was read before."""
    if not isinstance(value, WaitingTensor):
        return value.to("cpu") if isinstance(value, torch.Tensor) and not value.is_meta else value
    key = id(value.source)
    if key not in read:
        read[key] = value.now(torch.device("cpu"))
    return read[key]
