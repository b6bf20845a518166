"""Offload of activations: of what the forward pass saves for the backward pass, a share waits on the host.

It is the twin of what streaming does for weights, on torch's own hooks for saved tensors.
"""

from __future__ import annotations

from types import TracebackType
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from stages.finetune.offload_options import ActivationTraffic, check_ratio, check_tag
from stages.machine.devices import Devices
from stages.units import DeviceId


class _Saved(NamedTuple):
    """One tensor as autograd holds it: where it was, and itself or its copy on the host."""

    tensor: torch.Tensor
    device: torch.device | None


class CPUOffload:
    """A context in which ``offload_ratio`` of the bytes that are saved for the backward pass go to the host.

    ``device`` of ``devices`` is where the model computes. Weights stay where they are. ``tag`` names what is inside.
    """

    def __init__(
        self,
        offload_ratio: float = 0.1,
        tag: str = "block",
        *,
        devices: Devices | None = None,
        device: DeviceId = 0,
    ) -> None:
        self.offload_ratio, self.tag = check_ratio(offload_ratio), check_tag(tag)
        self._devices, self._device = devices or Devices(), device
        self._hooks: list[saved_tensors_hooks] = []
        self._kept = self._gone = 0

    def __enter__(self) -> CPUOffload:
        self._kept = self._gone = 0
        self._hooks.append(saved_tensors_hooks(self._pack, self._unpack))
        self._hooks[-1].__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._hooks:
            self._hooks.pop().__exit__(kind, error, at)

    @property
    def traffic(self) -> dict[str, ActivationTraffic]:
        """What was saved in the last iteration, by tag."""
        return {self.tag: ActivationTraffic(self._kept, self._gone)}

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        base = tensor if tensor._base is None else tensor._base
        if isinstance(base, nn.Parameter):
            return _Saved(tensor.detach(), None)
        due = self.offload_ratio * (self._kept + self._gone + tensor.nbytes) - self._gone
        if not self._devices.is_apart(self._device) or 2 * due < tensor.nbytes or tensor.layout != torch.strided:
            self._kept += tensor.nbytes
            return _Saved(tensor.detach(), None)
        self._gone += tensor.nbytes
        return _Saved(tensor.detach().to("cpu", copy=True), tensor.device)

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        return saved.tensor if saved.device is None else saved.tensor.to(saved.device)
