"""What is remembered from one iteration to the next.

``with CPUOffload(...)`` is written into the loop, so each iteration makes an object of its own, and what was learned
lives here, by tag: the sizes that the last pass saved, and the memory that what went away waited in. It goes with the
model: the first parameter that was seen under a tag takes it along.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch

from offstage.stages.finetune.offload_choice import SavedSizes
from offstage.stages.finetune.saved_span import SavedSpan, SpanKey, key_of
from offstage.stages.finetune.swap import Swap

_HISTORIES: dict[str, TagHistory] = {}
_SPANS: weakref.WeakValueDictionary[SpanKey, SavedSpan] = weakref.WeakValueDictionary()
"""All that is saved now, under whichever tag."""
_MOST_TAGS = 1024
"""Of more than that, those that weren't used for longest are forgotten: some program makes a new one each time."""
_LOCK = threading.Lock()


class TagHistory:
    """What is known of one tag: of its last pass ``sizes``, null before the first has ended, and its swaps."""

    def __init__(self) -> None:
        self.sizes: SavedSizes | None = None
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._swaps: dict[tuple[str, torch.device], tuple[object, Swap]] = {}
        self._lives_with_model = False

    def learn(self, sizes: list[int], storages: dict[int, weakref.ref[torch.UntypedStorage]]) -> None:
        """Remember a pass that is over."""
        self.sizes, self._storages = SavedSizes.of(sizes), storages

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` was there in the last pass, and no operation of the model has made it.

        Such are buffers, the data of parameters, and inputs that the caller keeps: moving them would free nothing.
        """
        storage = tensor.untyped_storage()
        known = self._storages.get(storage._cdata)
        return tensor.grad_fn is None and known is not None and known() is storage

    def live_with(self, tag: str, parameter: torch.Tensor) -> None:
        """Be forgotten when ``parameter`` is gone."""
        if not self._lives_with_model:
            self._lives_with_model = True
            weakref.finalize(parameter, _forget, tag, weakref.ref(self)).atexit = False

    @property
    def swaps(self) -> list[Swap]:
        """What holds what is away."""
        return [swap for _, swap in self._swaps.values()]

    def swap(self, way: tuple[str, torch.device], settings: object, make: Callable[[], Swap]) -> Swap:
        """Return the swap for a ``way`` (which target, from which device), made anew if its ``settings`` are others."""
        known = self._swaps.get(way)
        if known is None or known[0] != settings:
            known = self._swaps[way] = (settings, make())
        return known[1]

    def trim(self) -> None:
        """Give back memory and files that the last passes didn't use."""
        for swap in self.swaps:
            swap.trim()


def history_of(tag: str) -> TagHistory:
    """Return what is known of ``tag``."""
    with _LOCK:
        history = _HISTORIES.pop(tag) if tag in _HISTORIES else TagHistory()
        _HISTORIES[tag] = history  # behind all others
        while len(_HISTORIES) > _MOST_TAGS:
            _HISTORIES.pop(next(iter(_HISTORIES)))
        return history


def _forget(tag: str, history: weakref.ref[TagHistory]) -> None:
    if _HISTORIES.get(tag) is history():
        _HISTORIES.pop(tag, None)


def find_span(tensor: torch.Tensor) -> tuple[SpanKey, SavedSpan | None]:
    """Return the memory that ``tensor`` stands for, and its span where that is saved already, as it is now."""
    key = key_of(tensor)
    span = _SPANS.get(key)
    return key, span if span is not None and span.is_of(tensor) else None


def remember_span(key: SpanKey, span: SavedSpan) -> None:
    """Have ``span`` found for as long as it lives."""
    _SPANS[key] = span
