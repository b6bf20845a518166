"""The hook that a streamed model has at its top: it holds the engine, and gives the weights back when it goes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from offstage.stages.dispatch.accelerate_api.align import AlignDevicesHook, SkipKeys
from offstage.stages.dispatch.streaming.streamer import Streamer
from offstage.stages.dispatch.streaming.waiting_tensor import WaitingTensor, bring_home, rebuild

Table = dict[str, Any]


class EngineHook(AlignDevicesHook):
    """Sends the model's inputs to ``execution_device`` and its output back, as scripts expect of a model's own hook.

    What it was told to send away comes back to where it was when the hook is removed, and so do the buffers that had to
    follow it. A tensor that was never in memory goes on waiting, and reads itself at each use.
    """

    permanent = True

    def __init__(self, execution_device: torch.device, *, skip_keys: SkipKeys = None) -> None:
        super().__init__(execution_device, io_same_device=True, skip_keys=skip_keys)
        self.streamer: Streamer | None = None
        self._away: list[tuple[Table, str]] = []
        self._returning: list[tuple[Table, str, torch.device]] = []

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has: all but the engine, which is one model's; what waits in the copy reads itself."""
        return {**vars(self), "streamer": None}

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Return ``module``: its weights are placed already."""
        return module

    def send_away(self, table: Table, attribute: str, waiting: torch.Tensor) -> None:
        """Bind ``waiting`` in the place of a tensor that it stands for."""
        table[attribute] = waiting
        self._away.append((table, attribute))

    def settle(self, table: Table, attribute: str, tensor: torch.Tensor, *, returns: bool) -> None:
        """Bind ``tensor`` in the place of one on another device, to which it ``returns`` in the end or not."""
        before = table[attribute].device
        table[attribute] = tensor
        if returns and before.type != "meta":
            self._returning.append((table, attribute, before))

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Take the engine off and bring everything back."""
        streamer, self.streamer = self.streamer, None
        if streamer is not None:
            streamer.remove()
        for table, attribute in self._away:
            if isinstance(table.get(attribute), WaitingTensor):
                table[attribute] = bring_home(table[attribute])
            if isinstance(table.get(attribute), WaitingTensor):
                table[attribute].source.told = self.execution_device  # what is added to it now is to have data
        for table, attribute, device in self._returning:
            if attribute in table:  # else it was taken out of its module
                table[attribute] = rebuild(table[attribute], table[attribute].detach().to(device))
        self._away, self._returning = [], []
        return super().detach_hook(module)
