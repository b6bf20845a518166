"""What autograd saves for the backward pass: which storages, in which modules' calls, from when to when.

A storage that is saved twice is one. Weights, inputs and all else that was there before the forward don't count.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from offstage.stages.empty_init.live_storages import CountingFakes, LiveStorages


@dataclass(slots=True)
class SavedStorage:
    """The ``number``-th storage that is saved; ``modules`` were running then. ``is_away`` says that it was let go."""

    number: int
    bytes: int
    modules: Collection[str]
    is_away: bool = False


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class _Hold:
    """What autograd keeps: ``saved`` is saved for as long as this lives."""

    saved: SavedStorage


class _Held(NamedTuple):
    hold: _Hold
    tensor: torch.Tensor


class SavedStorages:
    """The storages that are saved in a forward inside ``hooks()``; ``running`` tells which modules run."""

    def __init__(self, storages: LiveStorages, running: Callable[[], Collection[str]]) -> None:
        self._storages, self._running = storages, running
        self._holds: dict[int, weakref.ref[_Hold]] = {}  # by storage, for as long as that lives
        self._saved: dict[int, SavedStorage] = {}  # by number
        self._count = 0
        self.bytes = 0
        """The bytes that are saved now."""

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return the context in which what is saved is seen."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return what autograd keeps in place of ``tensor``; itself where it isn't counted."""
        hold = self._hold(tensor)
        return tensor if hold is None else _Held(hold, tensor)

    def unpack(self, saved: Any) -> torch.Tensor:
        """Return the tensor that was saved."""
        tensor: torch.Tensor = saved.tensor if isinstance(saved, _Held) else saved
        return tensor

    def bytes_by_module(self) -> dict[str, int]:
        """Return the bytes saved now, by each module in whose calls they were."""
        totals: dict[str, int] = {}
        for saved in self._saved.values():
            for name in saved.modules:
                totals[name] = totals.get(name, 0) + saved.bytes
        return totals

    def _hold(self, tensor: torch.Tensor) -> _Hold | None:
        count = self._storages.counted(tensor)
        if not count:
            return None
        storage = tensor.untyped_storage()
        reference = self._holds.get(storage._cdata)
        hold = reference() if reference is not None else None
        if hold is None:
            self._count += 1
            hold = _Hold(SavedStorage(self._count, count, self._running()))
            self._saved[self._count] = hold.saved
            self.bytes += count
            weakref.finalize(hold, self._released, hold.saved).atexit = False
            self._follow(storage, hold)
        return hold

    def _follow(self, storage: torch.UntypedStorage, hold: _Hold) -> None:
        """Know ``hold`` by ``storage`` until that dies."""
        self._holds[storage._cdata] = weakref.ref(hold)
        weakref.finalize(storage, self._died, storage._cdata).atexit = False

    def _died(self, key: int) -> _Hold | None:
        """Forget the storage ``key``; return what autograd still keeps of it."""
        reference = self._holds.pop(key, None)
        return reference() if reference is not None else None

    def _released(self, saved: SavedStorage) -> None:
        del self._saved[saved.number]
        self.bytes -= saved.bytes


class _Dropped(NamedTuple):
    hold: _Hold
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


@dataclass(slots=True)
class _Trip:
    """A storage that is let go: how many tensors of it autograd keeps, and how many of them were asked for.

    When it has come back, it is held as ``whole``, flat bytes, until each has been asked for.
    """

    tensors: int = 0
    asked: int = 0
    whole: torch.Tensor | None = None


class DroppedStorages(SavedStorages):
    """As if all that is saved were offloaded: fake tensors are let go, and made again when the backward asks for them.

    ``away`` are the bytes that would be held if they weren't: only autograd would hold them. What is smaller than
    ``smallest`` bytes stays.
    """

    def __init__(self, mode: CountingFakes, running: Callable[[], Collection[str]], *, smallest: int) -> None:
        super().__init__(mode.storages, running)
        self._mode, self._smallest = mode, smallest
        self._trips: dict[int, _Trip] = {}  # by what is saved, for as long as it is
        self._away: dict[int, int] = {}  # the bytes of what is away, what was saved first first
        self.away = 0

    @property
    def next_bytes(self) -> int:
        """The bytes of what will be brought next: the last that was saved of all that is away."""
        return self._away[max(self._away)] if self._away else 0

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return what autograd keeps of ``tensor``: its shape, or itself where it is small or isn't counted."""
        hold = self._hold(tensor)
        if hold is None or hold.saved.bytes < self._smallest:
            return tensor if hold is None else _Held(hold, tensor)
        self._trips.setdefault(hold.saved.number, _Trip()).tensors += 1
        return _Dropped(hold, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())

    def unpack(self, kept: Any) -> torch.Tensor:
        """Return a tensor of the shape of the one that was saved; its bytes count where no other holds them."""
        if not isinstance(kept, _Dropped):
            return super().unpack(kept)
        saved, width = kept.hold.saved, kept.dtype.itemsize
        trip = self._trips[saved.number]
        with self._mode.unwatched():
            whole = trip.whole
            if whole is None:
                whole = torch.empty(saved.bytes, dtype=torch.uint8, device="cpu")
            tensor = whole[: saved.bytes // width * width].view(kept.dtype)
            tensor = tensor.as_strided(kept.size, kept.stride, kept.offset)
        self._storages.meet(whole, counts=saved.is_away)
        if saved.is_away:
            self._back(saved)
            self._follow(whole.untyped_storage(), kept.hold)
            trip.whole = whole
        trip.asked += 1
        if trip.asked >= trip.tensors:
            trip.whole, trip.asked = None, 0
        return tensor

    def _back(self, saved: SavedStorage) -> None:
        saved.is_away = False
        self.away -= self._away.pop(saved.number)

    def _died(self, key: int) -> _Hold | None:
        hold = super()._died(key)
        if hold is not None and hold.saved.bytes >= self._smallest:
            hold.saved.is_away = True
            self._away[hold.saved.number] = hold.saved.bytes
            self.away += hold.saved.bytes
        return hold

    def _released(self, saved: SavedStorage) -> None:
        super()._released(saved)
        self._trips.pop(saved.number, None)
        if saved.is_away:
            self._back(saved)
