"""Keys and values that wait on the host: a layer's come to where it computes for its own attention, and go again.

An accelerator then has those of one layer at a time, and the whole of that layer's is copied over its link for each
token; new ones go to the host once. While a layer computes, those of the next are on their way, on the stream of what
is awaited; which is the next, the tokens before show. Bits are those of the cache that stays. Layers that keep a window
or a state keep it where they compute: that is small, and doesn't grow. What a decoder keeps of its encoder's positions,
which don't grow either, waits as well: it is as much for a long input.
"""

from __future__ import annotations

import dis
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationMixin
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache

from offstage.pipeline.errors import ConfigError
from offstage.stages.calls.results import CACHES
from offstage.stages.dispatch.transfer.link import CopyBack, Link
from offstage.stages.empty_init.identity import read_config
from offstage.stages.inputs.generate_options import KEPT_POSITIONS
from offstage.stages.machine.aligned_memory import Bytes, align_up

Allocate = Callable[[int], Bytes]
"""Returns so many bytes of host memory that accelerators copy from by themselves."""
Change = Callable[[torch.Tensor], torch.Tensor]

_DECODED: ContextVar[Any] = ContextVar("_DECODED", default=None)
"""The cache of the call that decodes here: others in lockstep have theirs."""


@dataclass(frozen=True, slots=True)
class HostRoom:
    """Where a cache waits: in memory for so many ``positions`` at first, as ``allocate`` gives it.

    What comes ahead of its use comes over ``link_to`` the device; where that is null, nothing comes ahead.
    """

    positions: int
    allocate: Allocate
    link_to: Callable[[torch.device], Link | None] = lambda _: None


class HostRows:
    """Keys, or values, of one layer, which wait in ``room``."""

    def __init__(self, room: HostRoom) -> None:
        self.length = 0
        self._room = room
        self._rows: torch.Tensor | None = None  # of shape (positions, sequences, heads, size)
        self._coming: tuple[CopyBack, torch.Tensor] | None = None

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
        if not self.length:
            return
        rows = self._bring(self.length, device).permute(1, 2, 0, 3)
        self.length = 0
        self.append(change(rows))

    def reset(self) -> None:
        """Keep none, but the memory, for what comes next."""
        self.length, self._coming = 0, None

    def fetch(self, device: torch.device) -> torch.Tensor:
        """Return those of all positions on ``device``, contiguous."""
        before = self._bring(self.length, device).permute(1, 2, 0, 3)
        return before.new_empty(before.shape).copy_(before)

    def ask(self, device: torch.device) -> None:
        """Have those of all positions be on their way to ``device``, for the next use."""
        link = self._room.link_to(device)
        if link is None or self._rows is None or not self.length or self._coming is not None:
            return
        waiting = self._rows[: self.length]
        target = torch.empty_like(waiting, device=device)
        self._coming = CopyBack(link, waiting, target, urgent=True), target

    def _bring(self, count: int, device: torch.device) -> torch.Tensor:
        """Return those of the first ``count`` positions on ``device``, which may be on their way."""
        assert self._rows is not None
        coming, self._coming = self._coming, None
        if coming is None:
            return self._rows[:count].to(device, non_blocking=True)
        copy, target = coming
        copy.follow()
        return target[:count]

    def _fetch(self, states: torch.Tensor, past: int) -> torch.Tensor:
        assert self._rows is not None
        whole = states.new_empty((*states.shape[:2], self.length, states.shape[-1]))
        if not past:  # what was on its way was taken back since
            self._coming = None
        else:
            whole[..., :past, :] = self._bring(past, states.device).permute(1, 2, 0, 3)
        whole[..., past:, :] = states
        return whole

    def _with_room(self, states: torch.Tensor) -> torch.Tensor:
        """Return the memory, with room for all positions of what is as ``states``.

        Other memory is taken only after all that is on its way to or from what there was has come.
        """
        sequences, heads, _, size = states.shape
        each, before = (sequences, heads, size), self._rows
        if before is not None:
            if self.length <= len(before) and before.shape[1:] == each:
                return before
            if states.device.type != "cpu":
                torch.accelerator.synchronize(states.device)
            before = self._rows = before if before.shape[1:] == each else None
        shape = (align_up(max(self._room.positions, self.length), KEPT_POSITIONS), *each)
        memory = self._room.allocate(math.prod(shape) * states.dtype.itemsize)
        rows = torch.frombuffer(memory, dtype=states.dtype, count=math.prod(shape)).view(shape)
        if before is not None:
            rows[: len(before)] = before
        self._rows = rows
        return rows


class HostLayer(DynamicLayer):  # type: ignore[misc]
    """A layer that keeps all positions, on the host.

    A decoder's code reads what it keeps of its encoder's positions as ``keys`` and ``values``, which come then.
    """

    def __init__(self, room: HostRoom, order: LayerOrder) -> None:
        self._order = order
        self._kept = HostRows(room), HostRows(room)
        self.is_initialized = False

    @property
    def keys(self) -> torch.Tensor | None:
        """The keys of all positions, where they are used; null before there are any."""
        return self._kept[0].fetch(self.device) if self.is_initialized else None

    @property
    def values(self) -> torch.Tensor | None:
        """The values of all positions, where they are used once the keys are; null before there are any."""
        return self._order.note(self, self._kept[1].fetch(self.device)) if self.is_initialized else None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the new states; return those of all positions, where the new ones are."""
        self.device, self.is_initialized = key_states.device, True
        keys, values = self._kept
        return keys.append(key_states), self._order.note(self, values.append(value_states))

    def ask(self) -> None:
        """Have all of it be on its way to where it is used."""
        if self.is_initialized:
            for rows in self._kept:
                rows.ask(self.device)

    def get_seq_length(self) -> int:
        """Return how many positions it keeps."""
        return self._kept[0].length

    def reset(self) -> None:
        """Keep none."""
        for rows in self._kept:
            rows.reset()
        self.is_initialized = False

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


class LayerOrder:
    """Which layer of a cache is used after which, as it was the last time."""

    def __init__(self) -> None:
        self._following: dict[HostLayer, HostLayer] = {}
        self._last: HostLayer | None = None

    def note(self, layer: HostLayer, brought: torch.Tensor) -> torch.Tensor:
        """Hear that all of ``layer`` was ``brought`` to be used; return that, with the next layer on its way."""
        if self._last is not None:
            self._following[self._last] = layer
        self._last = layer
        following = self._following.get(layer)
        if following is not None:
            following.ask()
        return brought


@contextmanager
def host_cache(model: Any, room: HostRoom) -> Iterator[dict[str, Any]]:
    """Yield the argument of ``model``'s generate by which its cache waits in ``room``, for one call of that.

    A decoder's cache of its encoder's positions has memory for these. A generate that decodes several times, as
    Whisper's does each part of a recording, has its encoder called before each, and begins with an empty cache then.
    Raises ``ConfigError`` for a model that takes no cache.
    """
    argument, order = _cache_argument(model), LayerOrder()
    if argument is None:
        raise ConfigError(f"generate.cache_implementation: {type(model).__name__} {_TAKES_NONE}; leave it out")
    own = _of_layers(model, partial(HostLayer, room, order))
    if not model.config.is_encoder_decoder:
        yield {argument: own}
        return
    cache = EncoderDecoderCache(own, _of_layers(model, partial(HostLayer, replace(room, positions=0), order)))

    def begin(*_: object) -> None:
        if _DECODED.get() is cache:
            cache.reset()

    hook, before = model.get_encoder().register_forward_pre_hook(begin), _DECODED.set(cache)
    try:
        yield {argument: cache}
    finally:
        _DECODED.reset(before)
        hook.remove()


def why_not_on_host(architecture: str, folder: Path) -> str | None:
    """Return why a cache of the model of the checkpoint ``folder`` can't wait on the host; null where it can, as far as
    its class in transformers tells.
    """
    kind: Any = getattr(transformers, architecture, None)
    if kind is None:
        return None
    if not kind._supports_default_dynamic_cache():
        return f"{architecture} has a cache of a kind of its own"
    if _cache_argument(kind) is None:
        return f"{architecture} {_TAKES_NONE}"
    if not _decodes_once(kind) and not read_config(folder).get("is_encoder_decoder"):
        return f"{architecture} has a generate of its own, and no encoder whose calls say when that begins another one"
    return None


def _decodes_once(kind: Any) -> bool:
    """Return whether a call of generate of the class ``kind`` decodes once, and as transformers does.

    Its own may do something before it hands over to that, as its code says: outside of any loop. None of the steps of
    decoding is its own then.
    """
    generate = inspect.unwrap(getattr(kind, "generate", GenerationMixin.generate))
    if generate is inspect.unwrap(GenerationMixin.generate):
        return True
    loops = any(step.opname.startswith(("FOR_ITER", "JUMP_BACKWARD")) for step in dis.get_instructions(generate))
    steps = [name for name in vars(GenerationMixin) if name.startswith(("_prepare_", "_update_"))]
    as_all = all(getattr(kind, name, None) is getattr(GenerationMixin, name) for name in steps)
    return as_all and not loops and {"super", "generate"} <= {*generate.__code__.co_names}


_TAKES_NONE = "takes no cache from whoever calls it"


def _cache_argument(model: Any) -> str | None:
    """Return what ``model``, or its class, calls the cache among its forward's arguments; null where it takes none."""
    return next((name for name in inspect.signature(model.forward).parameters if name in CACHES), None)


def _of_layers(model: Any, make: Callable[[], HostLayer]) -> DynamicCache:
    """Return a cache of ``model`` in which layers that keep all positions are as ``make`` makes them."""
    cache = DynamicCache(config=model.config)
    if cache.layers:
        cache.layers = [make() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    else:
        cache.layer_class_to_replicate = make
    return cache
