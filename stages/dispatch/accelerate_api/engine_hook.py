"""The hook that a streamed model has at its top: it holds the engine, and gives the weights back when it goes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from offstage.stages.dispatch.accelerate_api.align import AlignDevicesHook, SkipKeys, resolve_device
from offstage.stages.dispatch.streaming.places import TensorPlace
from offstage.stages.dispatch.streaming.streamer import Streamer
from offstage.stages.dispatch.streaming.waiting_tensor import WaitingTensor


class EngineHook(AlignDevicesHook):
    """Sends the model's inputs to ``execution_device`` and its output back, as scripts expect of a model's own hook.

    What it was told to send away comes back to where it was when the hook is removed, and so do the buffers that had to
    follow it. A tensor that was never in memory goes on waiting, and reads itself at each use.
    """

    permanent = True

    def __init__(self, execution_device: torch.device, *, skip_keys: SkipKeys = None) -> None:
        super().__init__(execution_device, io_same_device=True, skip_keys=skip_keys)
        self.streamer: Streamer | None = None
        self._away: list[TensorPlace] = []
        self._returning: list[tuple[TensorPlace, torch.device]] = []

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has: all but the engine, which is one model's; what waits in the copy reads itself."""
        return {**vars(self), "streamer": None}

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Return ``module``: its weights are placed already."""
        return module

    def send_away(self, place: TensorPlace, waiting: torch.Tensor) -> None:
        """Have ``waiting`` stand in ``place`` for the tensor that was there."""
        place.settle(waiting)
        self._away.append(place)

    def keep_on(self, place: TensorPlace, tensor: torch.Tensor, *, returns: bool) -> None:
        """Have ``tensor`` stand in ``place`` of one on another device, to which it ``returns`` in the end or not."""
        home = place.before.device
        place.settle(tensor)
        if returns and home.type != "meta":
            self._returning.append((place, home))

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Take the engine off and bring everything back."""
        streamer, self.streamer = self.streamer, None
        if streamer is not None:
            streamer.remove()
        for place in self._away:
            place.come_home()
            if isinstance(place.now, WaitingTensor):
                place.now.source.told = resolve_device(self.execution_device)  # what is added to it now is to have data
        for place, home in self._returning:
            place.move(home)
        self._away, self._returning = [], []
        return super().detach_hook(module)
