"""What autograd saves, as memory: tensors are views of storages, and a storage is freed as a whole.

So a view that covers most of its storage stands for all of it: views that share one (a hidden state and its flat view,
the thirds of a fused projection) go once and come back once, at their own strides. A view of a small part of a large
storage stands for that part. What was written to after it was saved is told by the version, as autograd does.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, Protocol

import torch
from torch import nn

from offstage.stages.dispatch.streaming.saved_weights import changed
from offstage.stages.finetune.stores import Parcel

SPAN_ALIGNMENT = 512
"""Where a part of a storage may begin, in bytes: kernels are chosen by alignment, and torch aligns no better."""

SpanKey = tuple[int, int, int]
"""A storage's address as torch knows it, and the part's begin and end in bytes."""


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is a view of a storage that holds data; all others stay as they are."""
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.device.type != "meta"
        and tensor.numel() > 0
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def is_weight(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is a parameter, a buffer made as ``nn.Buffer``, or a view of one."""
    base = tensor if tensor._base is None else tensor._base
    return isinstance(base, nn.Parameter | nn.Buffer)


def key_of(tensor: torch.Tensor) -> SpanKey:
    """Return which memory ``tensor`` stands for."""
    storage, itemsize = tensor.untyped_storage(), tensor.element_size()
    begin = tensor.storage_offset() * itemsize
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    end = int(begin + (sum((count - 1) * stride for count, stride in steps) + 1) * itemsize)
    if 2 * (end - begin) >= storage.nbytes():
        return storage._cdata, 0, storage.nbytes()
    return storage._cdata, int(begin) // SPAN_ALIGNMENT * SPAN_ALIGNMENT, end


def find_span(key: SpanKey, tensor: torch.Tensor) -> SavedSpan | None:
    """Return the span of the memory ``key`` where it is saved already, as ``tensor`` has it now."""
    span = _SPANS.get(key)
    return span if span is not None and span.is_of(tensor) else None


def remember_span(key: SpanKey, span: SavedSpan) -> None:
    """Have ``span`` found for as long as it lives."""
    _SPANS[key] = span


class SpanOwner(Protocol):
    """What saved a span, and brings it back."""

    freed: deque[int]
    """Takes the bytes that a span held when it is gone."""

    def place(self, span: SavedSpan) -> int:
        """Return where in the order stands the tensor that is saved now, a view of ``span``."""

    def bring(self, span: SavedSpan, place: int) -> tuple[torch.UntypedStorage, int]:
        """Return the storage that has the bytes of ``span``, and where in the original one it begins, in bytes."""


class SavedSpan:
    """One stretch of saved memory, and where its bytes are: on the device (``source``), in a ``parcel``, or, on the way
    there, in both.

    In the original storage the span begins at ``begin`` (bytes), and the storage of its source at ``source_begin``.
    """

    def __init__(self, tensor: torch.Tensor, key: SpanKey, owner: SpanOwner, *, stays: bool) -> None:
        self.owner, self.counted = owner, 0
        self.size, self.version, self.stays = key[2] - key[1], tensor._version, stays
        self.source: torch.Tensor | None = tensor.detach()  # shares the version; the tensor itself holds its graph
        self.begin, self.source_begin = key[1], 0
        self.parcel: Parcel[Any] | None = None
        self.handles = self.served = 0
        self.is_spent = False  # this backward pass has been given it as often as it was saved
        self._storage = weakref.ref(tensor.untyped_storage())
        self._written: int | None = None

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor``, whose key is this one's, has the bytes that were saved."""
        return self._storage() is tensor.untyped_storage() and self.version == tensor._version

    @property
    def gone(self) -> int:
        """How many of its bytes are away."""
        return 0 if self.parcel is None else self.parcel.gone

    @property
    def is_away(self) -> bool:
        """Whether bytes have gone, and weren't fetched."""
        return self.source is None and self.parcel is not None and self.parcel.room is None

    @property
    def is_leaving(self) -> bool:
        """Whether the bytes are on their way out."""
        return self.source is not None and self.parcel is not None

    @property
    def on_device(self) -> int:
        """How many bytes of the device it holds."""
        return self.size - self.gone if self.is_away else self.size

    def data(self) -> torch.Tensor:
        """Return the bytes, flat, of a span that is on the device."""
        source = self.source
        assert source is not None
        whole = torch.empty(0, dtype=torch.uint8, device=source.device)
        return whole.set_(source.untyped_storage(), self.begin - self.source_begin, (self.size,), (1,))

    def let_go(self) -> None:
        """Hold the device's memory no more; what was written to it meanwhile is noted."""
        assert self.source is not None
        if self.source._version != self.version:
            self._written = self.source._version
        self.source = None

    def check(self) -> None:
        """Raise autograd's kind of error if the memory was written to after it was saved, before it was away."""
        if self.source is not None and self.source._version != self.version:
            self._written = self.source._version
        if self._written is not None:
            raise changed(self.version, self._written)

    def __del__(self) -> None:
        self.owner.freed.append(self.counted)  # in any thread, and in the middle of any statement


_SPANS: weakref.WeakValueDictionary[SpanKey, SavedSpan] = weakref.WeakValueDictionary()
"""All that is saved now, in whichever pass."""


class SavedTensor:
    """What autograd holds in place of a tensor: which span it views, and how."""

    __slots__ = ("_dtype", "_offset", "_place", "_shape", "_span", "_stride")

    def __init__(self, tensor: torch.Tensor, span: SavedSpan) -> None:
        self._span, self._place, self._dtype = span, span.owner.place(span), tensor.dtype
        self._offset = tensor.storage_offset() * tensor.element_size()
        self._shape, self._stride = tensor.shape, tensor.stride()

    def unpack(self) -> torch.Tensor:
        """Return the tensor, in the memory where it was or in new."""
        storage, begin = self._span.owner.bring(self._span, self._place)
        offset = (self._offset - begin) // self._dtype.itemsize
        return torch.empty(0, dtype=self._dtype, device=storage.device).set_(storage, offset, self._shape, self._stride)
