"""Keys and values that wait on the host: a layer's come to where it computes for its own attention, and go again.

An accelerator then has those of one layer at a time, and the whole of that layer's is copied over its link for each
token; new ones go to the host once. Bits are those of the cache that stays. Layers that keep a window or a state keep
it where they compute: that is small, and doesn't grow.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from offstage.stages.calls.results import CACHES
from offstage.stages.inputs.generate_options import KEPT_POSITIONS
from offstage.stages.machine.aligned_memory import Bytes, align_up

Allocate = Callable[[int], Bytes]
"""Returns so many bytes of host memory that accelerators copy from by themselves."""
Change = Callable[[torch.Tensor], torch.Tensor]


class HostRows:
    """Keys, or values, of one layer on the host; ``room`` is how many positions there is memory for at first."""

    def __init__(self, room: int, allocate: Allocate) -> None:
        self.length = 0
        self._room, self._allocate = room, allocate
        self._rows: torch.Tensor | None = None  # of shape (positions, sequences, heads, size)

    def append(self, states: torch.Tensor) -> torch.Tensor:
        """Keep ``states`` of shape (sequences, heads, new positions, size); return those of all positions, beside them.

        They are contiguous, as if they had been concatenated there.
        """
        past, self.length = self.length, self.length + states.shape[-2]
        rows = self._with_room(states)
        rows[past : self.length].copy_(states.permute(2, 0, 1, 3).contiguous(), non_blocking=True)
        return self._fetch(states, past)

    def change(self, change: Change, device: torch.device) -> None:
        """Have all of them be what ``change`` makes of them on ``device``, of other sequences or fewer positions."""
        if self._rows is None:
            return
        there = self._rows[: self.length].to(device).permute(1, 2, 0, 3)
        self.length, self._rows = 0, None
        self.append(change(there))

    def _fetch(self, states: torch.Tensor, past: int) -> torch.Tensor:
        assert self._rows is not None
        whole = states.new_empty((*states.shape[:2], self.length, states.shape[-1]))
        if past:
            before = self._rows[:past].to(states.device, non_blocking=True)
            whole[..., :past, :] = before.permute(1, 2, 0, 3)
        whole[..., past:, :] = states
        return whole

    def _with_room(self, states: torch.Tensor) -> torch.Tensor:
        """Return the memory, with room for all positions: more of it only after what is on its way there has come."""
        if self._rows is not None and self.length <= len(self._rows):
            return self._rows
        sequences, heads, _, size = states.shape
        shape = (align_up(max(self._room, self.length), KEPT_POSITIONS), sequences, heads, size)
        memory = self._allocate(math.prod(shape) * states.dtype.itemsize)
        rows = torch.frombuffer(memory, dtype=states.dtype, count=math.prod(shape)).view(shape)
        if self._rows is not None:
            if states.device.type != "cpu":
                torch.accelerator.synchronize(states.device)
            rows[: len(self._rows)] = self._rows
        self._rows = rows
        return rows


class HostLayer(DynamicLayer):  # type: ignore[misc]
    """A layer that keeps all positions, on the host."""

    def __init__(self, room: int, allocate: Allocate) -> None:
        super().__init__()
        self._kept = HostRows(room, allocate), HostRows(room, allocate)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the new states; return those of all positions, where the new ones are."""
        self.device, self.is_initialized = key_states.device, True
        keys, values = self._kept
        return keys.append(key_states), values.append(value_states)

    def get_seq_length(self) -> int:
        """Return how many positions it keeps."""
        return self._kept[0].length

    def reset(self) -> None:
        """Keep none."""
        self._kept = tuple(HostRows(rows._room, rows._allocate) for rows in self._kept)  # type: ignore[assignment]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget so many of the last positions, told as a negative number."""
        for rows in self._kept:
            rows.length -= min(rows.length, abs(tokens_to_remove))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Have each sequence go on from another one's positions."""
        self._change(lambda states: states.index_select(0, beam_idx.to(states.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Have each sequence be so many."""
        self._change(lambda states: states.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these sequences alone."""
        self._change(lambda states: states[indices, ...])

    def _change(self, change: Change) -> None:
        for rows in self._kept:
            rows.change(change, self.device)


def host_cache(model: Any, allocate: Allocate, *, room: int) -> dict[str, Any]:
    """Return the argument of ``model``'s generate by which its cache is on the host, with memory for ``room`` positions
    at first.
    """
    make, cache = partial(HostLayer, room, allocate), DynamicCache(config=model.config)
    if cache.layers:
        cache.layers = [make() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    else:
        cache.layer_class_to_replicate = make
    taken = [name for name in inspect.signature(model.forward).parameters if name in CACHES]
    return {taken[0]: cache}
