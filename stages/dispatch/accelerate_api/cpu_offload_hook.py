"""Whole models that take turns on a device: each comes when it is called and stays until the next one is."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from offstage.stages.dispatch.accelerate_api.align import resolve_device
from offstage.stages.dispatch.accelerate_api.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from offstage.stages.dispatch.transfer.values import send_to_device
from offstage.stages.machine.devices import AnyDevice


class CpuOffload(ModelHook):
    """Keeps a whole module on the host until it is called; then it moves to ``execution_device`` and stays there.

    Before it moves, the module of ``prev_module_hook`` is sent back. By default the device is the accelerator that
    torch works with, or the cpu where there is none.
    """

    def __init__(
        self, execution_device: AnyDevice | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device = _default_device() if execution_device is None else execution_device

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Send ``module`` to the host."""
        return module.to("cpu")

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Send the previous module back, and bring ``module`` and the inputs to the device."""
        if self.prev_module_hook is not None:
            self.prev_module_hook.offload()
        device = resolve_device(self.execution_device)
        module.to(device)
        if device is None:
            return args, kwargs
        return send_to_device(args, device), send_to_device(kwargs, device)


class UserCpuOffloadHook:
    """A module with its ``CpuOffload`` hook: what its user needs to send it back, or to remove the hook."""

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Send the module back to the host; its next call brings it in again."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook; the module stays where it is."""
        remove_hook_from_module(self.model)


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: AnyDevice | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep ``model`` on the host until it is called, and return it with the hook that sends it back.

    Models are chained by giving each the hook of the one before: calling the second sends the first back. A
    model that is called in a loop stays where it is, and the last one is sent back by hand:

    >>> first, hook_1 = cpu_offload_with_hook(nn.Linear(4, 4))
    >>> second, hook_2 = cpu_offload_with_hook(nn.Linear(4, 4), prev_module_hook=hook_1)
    >>> hidden = first(torch.zeros(1, 4))
    >>> for _ in range(9):
    ...     hidden = second(hidden)  # the first time first goes back to the host, then nothing moves
    >>> hook_2.offload()
    """
    hook = CpuOffload(execution_device=execution_device, prev_module_hook=prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


def _default_device() -> torch.device:
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    return torch.device(torch.accelerator.current_accelerator().type, torch.accelerator.current_device_index())  # type: ignore[union-attr]
