"""One cache of keys and values for the forwards of several positions at once.

The forward of each position has to see what it sees in plain decoding: the keys and values of all positions before it,
and none after. So each has a view of the cache, which counts as many positions as lie before its own whatever has been
written by then, and writes to a layer once the position before it has. In lockstep that is so anyway, as long as all
take the same way through the model; tokens that go to different experts do not.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

from offstage.stages.dispatch.streaming.lockstep import WaitFor
from offstage.stages.units import Position

Layers = tuple[type, ...]

_EMPTY: Layers = tuple(filter(None, [getattr(cache_utils, "DummyLayer", None)]))
"""The layers that keep nothing, where transformers knows of such."""
_SHARED: Layers = (DynamicLayer, DynamicSlidingWindowLayer, *_EMPTY)
"""The layers of which the last positions can be taken back: others keep a state that each token changes."""


class LayerView(CacheLayerMixin):  # type: ignore[misc]
    """What the forward of a position sees of one layer of a cache: the ``past`` positions before it.

    It is waited for as a part of the model is: in a pass it comes first as soon as the position before has
    written.
    """

    def __init__(self, layer: Any, past: int, wait_for: WaitFor) -> None:
        super().__init__()
        self._layer, self._wait_for = layer, wait_for
        self.cumulative_length = past
        self.is_initialized = True
        self.is_sliding = layer.is_sliding
        self.sliding_window = getattr(layer, "sliding_window", None)

    @property
    def position(self) -> Position:
        """Where it stands in the order of a pass: before all else, or not yet anywhere."""
        return (-1,) if self._is_next else (sys.maxsize,)

    @property
    def _is_next(self) -> bool:
        return bool(self._layer.get_seq_length() == self.cumulative_length)

    def expect(self, users: int) -> None:
        """Nothing: it has one user."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the prompt's forward has begun the layer."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of the position; return those that it attends to, laid out as in plain decoding.

        Raises ``RuntimeError`` where the forward of a position before has left the layer out.
        """
        if not self._is_next:
            self._wait_for(self)
        if not self._is_next:
            raise RuntimeError(
                f"the keys and values of position {self.cumulative_length} have come before those of the one before "
                "it: the model leaves layers out for some tokens; set generate.speculation=batched"
            )
        # Some releases of transformers give all that a window keeps until then, and not what the mask is for.
        length, _ = self.get_mask_sizes(key_states.shape[-2])
        keys, values = self._layer.update(key_states, value_states, *args, **kwargs)
        return keys[..., -length:, :].contiguous(), values[..., -length:, :].contiguous()

    def get_seq_length(self) -> int:
        """Return how many positions lie before."""
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and the offset of the keys that the mask is for, as the layer itself counts them."""
        length, offset = type(self._layer).get_mask_sizes(self, query_length)
        return length, offset

    def get_max_length(self) -> int:
        """Return how many positions there can be; -1 for any number."""
        return int(self._layer.get_max_length())


def view_of(cache: Any, number: int, wait_for: WaitFor) -> Any:
    """Return ``cache`` as the forward of the position sees it that lies ``number`` after the next one.

    An encoder's keys and values are the same for all positions.
    """
    if isinstance(cache, EncoderDecoderCache):
        return EncoderDecoderCache(view_of(cache.self_attention_cache, number, wait_for), cache.cross_attention_cache)
    view = copy.copy(cache)
    view.layers = [
        layer if isinstance(layer, _EMPTY) else LayerView(layer, layer.get_seq_length() + number, wait_for)
        for layer in cache.layers
    ]
    return view


def take_back(cache: Any, positions: int) -> None:
    """Have ``cache`` forget its last ``positions``, and of a window what no position will see any more."""
    decoder = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    decoder.crop(-positions)


def strange_layer(cache: Any, served: Layers = _SHARED) -> str | None:
    """Return the kind of the first layer of ``cache`` that isn't ``served``, or of it all; null where there is none.

    By default those are served that can be shared.
    """
    decoder = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    if not isinstance(decoder, Cache):
        return type(decoder).__name__
    return next((type(layer).__name__ for layer in decoder.layers if type(layer) not in served), None)


def why_not_shared(architecture: str, folder: Path) -> str | None:
    """Return why the model of the checkpoint ``folder`` can't have its cache shared; null where nothing is against it.

    It is told before any weight is read; what code of its own a model has shows when it is run.
    """
    if issubclass(getattr(transformers, architecture, object), WhisperGenerationMixin):
        return f"{architecture} may decode a part of a recording twice"
    return why_strange(architecture, folder, _SHARED)


def why_strange(architecture: str, folder: Path, served: Layers) -> str | None:
    """Return why the model of the checkpoint ``folder`` has no cache of layers that are ``served``; null where nothing
    is against it, as far as its class in transformers and its config tell.
    """
    kind = getattr(transformers, architecture, None)
    if kind is not None and not kind._supports_default_dynamic_cache():
        return f"{architecture} has a cache of a kind of its own"
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        strange = strange_layer(transformers.DynamicCache(config=config), served)
    except (ValueError, KeyError, AttributeError, OSError):  # code of its own, or what the skeleton will say
        return None
    return f"{architecture} keeps what it has read as {strange}" if strange else None
