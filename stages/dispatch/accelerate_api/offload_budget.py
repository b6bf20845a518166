"""Weights kept on the host up to a byte budget, one parameter after the other: vLLM's policy ``cpu_offload_gb``.

It extends an accelerator by a fixed number of host bytes, with no device map: the parameters that come first go to
the host until the budget is spent, and come over for each call of the module that was given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offstage.stages.dispatch.accelerate_api.hooks import ModelHook, add_hook_to_module
from offstage.stages.dispatch.streaming.places import TensorPlace, places_in
from offstage.stages.dispatch.streaming.waiting_tensor import rebuild
from offstage.stages.dispatch.transfer.link import pin
from offstage.stages.dispatch.transfer.links import open_link
from offstage.stages.machine.aligned_memory import HostBlock
from offstage.stages.machine.devices import Devices, device_id


@dataclass(slots=True)
class OffloadBudget:
    """The bytes that may lie on the host, and those that do: one object for all the modules that share it."""

    max_bytes: int
    used_bytes: int = 0

    @property
    def is_spent(self) -> bool:
        """Whether no further parameter goes to the host: the one that crosses the limit still does."""
        return self.used_bytes >= self.max_bytes


def maybe_offload_to_cpu(
    module: nn.Module, budget: OffloadBudget | int, *, device: torch.device | None = None
) -> nn.Module:
    """Send parameters of ``module`` to the host, in order, until ``budget`` is spent, and return the module.

    For each call they are on ``device`` (by default where the first parameter was), the way ``functional_call`` puts
    them there: bound under all their names for that call alone, for submodules and for code that reads them directly.
    A module that lies on the host is returned as it is, unless ``device`` is given. An int is a budget of its own.

    >>> model, budget = nn.Linear(2, 1), OffloadBudget(max_bytes=1000)
    >>> maybe_offload_to_cpu(model, budget, device=torch.device("cpu"))(torch.ones(1, 2)).shape, budget.used_bytes
    (torch.Size([1, 1]), 12)
    """
    budget = OffloadBudget(budget) if isinstance(budget, int) else budget
    first = next(module.parameters(), None)
    if first is None or (device is None and first.device.type == "cpu"):
        return module
    chosen = _spend(module, budget)
    if chosen:
        add_hook_to_module(module, _HostParameters(chosen, device or first.device), append=True)
    return module


class _HostParameters(ModelHook):
    """Keeps the parameters ``chosen`` on the host, and binds copies of them on ``device`` for each call."""

    def __init__(self, chosen: list[nn.Parameter], device: torch.device) -> None:
        self.device = device
        self._places: list[TensorPlace] = []
        self._chosen = chosen
        self._homes = [parameter.device for parameter in chosen]

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Send the parameters to the host, where an accelerator copies from by itself: into memory of their size."""
        for parameter in self._chosen:
            parameter.data = parameter.data.to("cpu")
        if self.device.type == "cuda":
            block = HostBlock([parameter.nbytes for parameter in self._chosen])
            for parameter in self._chosen:
                if parameter.is_contiguous():
                    parameter.data = block.hold(parameter.data)
            pin(open_link(Devices(), device_id(self.device)), block.memory)  # until the last of them is gone
        chosen = {id(parameter) for parameter in self._chosen}
        places = (place for owner in module.modules() for place in places_in(owner))
        self._places = [place for place in places if id(place.before) in chosen]
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Bind a copy of each parameter on the device, under all its names."""
        copies = {id(own): rebuild(own, own.detach().to(self.device, non_blocking=True)) for own in self._chosen}
        for place in self._places:
            if place.now is place.before:
                place.bind(copies[id(place.before)])
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Bind the module's own tensors again."""
        self.forward_failed(module)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Bind the module's own tensors again."""
        for place in self._places:
            place.leave()

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Put the parameters back where they were."""
        self.forward_failed(module)
        for parameter, home in zip(self._chosen, self._homes, strict=True):
            parameter.data = parameter.data.to(home)
        return module


def _spend(module: nn.Module, budget: OffloadBudget) -> list[nn.Parameter]:
    """Return the parameters that go to the host, and charge the budget with their bytes."""
    chosen = []
    for parameter in module.parameters():
        if budget.is_spent:
            break
        budget.used_bytes += parameter.nbytes
        chosen.append(parameter)
    return chosen
