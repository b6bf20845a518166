"""The backward pass asks again for streamed parts: which of them, in which order, and what brings them.

What the graph of each pass has saved is known as the pass ends, so as its backward asks for the first of it, the others
are on their way.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch

from offstage.stages.dispatch.streaming.saved_weights import Bring
from offstage.stages.dispatch.streaming.streamed_part import StreamedPart
from offstage.stages.dispatch.streaming.waiting_tensor import WaitingTensor
from offstage.stages.dispatch.streaming.weight_cache import WeightCache
from offstage.stages.units import DeviceId

_Saved = dict[DeviceId, list[int]]
"""The parts that a graph has saved tensors of, by where they compute, in the order in which they were saved."""


class BackwardOrder:
    """What the graphs of a model's passes have saved.

    ``held`` is the context in which what streams is the calling thread's: a backward pass is in no forward.
    """

    def __init__(self, hold: Callable[[], AbstractContextManager[None]]) -> None:
        self._hold = hold
        self._caches: dict[DeviceId, WeightCache] = {}
        self._saving: _Saved | None = None
        self._asking: _Saved | None = None

    def begin_pass(self) -> None:
        """Say that a forward of the model begins."""
        self._saving, self._asking = {}, None

    def end_pass(self) -> None:
        """Say that it has ended; what a module saves now, called again by a checkpoint, is in no order."""
        self._saving = None

    def forget(self) -> None:
        """Let go of what brings parts: graphs that are still there need none of its memory."""
        self._caches.clear()

    def save(self, part: StreamedPart, index: int) -> Bring:
        """Note that the tensor of ``part`` at ``index`` was saved; return what brings it."""
        saving = self._saving
        if saving is not None and part.cache is not None:
            self._caches[part.computes] = part.cache
            order = saving.setdefault(part.computes, [])
            if order[-1:] != [part.number]:
                order.append(part.number)
        waiting = part.places[index].before
        assert isinstance(waiting, WaitingTensor)  # blocks of rows are in no graph
        return partial(self._bring, part, index, waiting, saving)

    def _bring(self, part: StreamedPart, index: int, waiting: WaitingTensor, saved: _Saved | None) -> torch.Tensor:
        with self._hold():
            if part.cache is None:  # the hooks are gone: it is read from where it waits
                return waiting.now(waiting.source.device)
            if saved is not None and saved is not self._asking:
                self._asking = saved
                for device, order in saved.items():
                    self._caches[device].turn(order)
            return part.cache.lend(part.number)[index]
