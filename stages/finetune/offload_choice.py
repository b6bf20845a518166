"""Which of the saved bytes go, and where; and what is remembered for that from one iteration to the next.

The share of all that goes is the ratio that was asked for. What is saved first goes: the backward pass needs it last.
So when it begins, at the peak, nothing has to come back, and what has gone has the whole backward pass to return in,
into memory that is free by then. How much "first" is follows from the pass before: as much larger or smaller as this
one is so far, so much it will be in the end. Where there is no pass before, each moment is taken for the end, which
spreads what goes evenly. The tensor on the border is split.

``with CPUOffload(...)`` is written into the loop, so each iteration makes an object of its own, and what was learned
lives here, by tag: the sizes that the last pass saved, and the memory that what went away waited in. It goes with the
model: the first parameter that was seen under a tag takes it along.
"""

from __future__ import annotations

import functools
import logging
import tempfile
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from offstage.stages.finetune.disk_store import open_disk_store
from offstage.stages.finetune.stores import ActivationStore, open_host_store
from offstage.stages.machine.devices import Devices, Ledger
from offstage.stages.units import CPU, DeviceId

_log = logging.getLogger("offstage")

AnyStore = ActivationStore[Any]

_HISTORIES: dict[str, TagHistory] = {}
_MOST_TAGS = 1024
"""Of more than that, those that weren't used for longest are forgotten: some program makes a new one each time."""
_LOCK = threading.Lock()

TOLERANCE = 0.01
"""How far off the ratio may be, as a share of all bytes, before a tensor is split for it."""
SMALL_SHARE = 0.01
"""The smallest tensors stay, as many as have this share of the bytes together: a copy costs a call, of any size."""
PIECE = 64
"""A part of a tensor that goes is a multiple of so many bytes."""


@dataclass(frozen=True, slots=True)
class SavedSizes:
    """What a pass saved: ``sums`` has the bytes after each tensor; none larger than ``small`` is worth a copy."""

    sums: tuple[int, ...]
    small: int

    @classmethod
    def of(cls, sizes: Sequence[int]) -> SavedSizes:
        """Return what ``sizes``, in the order in which they were saved, come to."""
        ascending = sorted(sizes)
        spared = sum(sizes) * SMALL_SHARE
        small = 0
        for size, upto in zip(ascending, accumulate(ascending), strict=True):
            if upto > spared:  # of several of one size all stay or none
                return cls(tuple(accumulate(sizes)), small if small < size else small - 1)
            small = size
        return cls(tuple(accumulate(sizes)), small)


class ShareChoice:
    """Chooses, tensor by tensor, how many bytes go; counts those that are ``gone`` of the ``total`` so far."""

    def __init__(self, ratio: float, last: SavedSizes | None = None) -> None:
        self.ratio, self.gone = ratio, 0
        self.sizes: list[int] = []
        self.total = 0
        self.is_over = False
        self._last = last

    @property
    def small(self) -> int:
        """The largest size that isn't worth a copy."""
        if self._last is None:
            return PIECE
        smaller = min(1.0, self.expected / self._last.sums[-1])  # at its beginning a pass may be taken for any size
        return int(self._last.small * smaller)

    @property
    def expected(self) -> float:
        """How many bytes the pass will have saved at its end."""
        seen = len(self.sizes)
        if self._last is None or self.is_over or not 0 < seen <= len(self._last.sums):
            return self.total
        return max(self.total, self._last.sums[-1] * self.total / max(self._last.sums[seen - 1], 1))

    @property
    def staying(self) -> float:
        """How many of the expected bytes stay."""
        return (1 - self.ratio) * self.expected

    @property
    def missing(self) -> int:
        """How many more bytes should have gone, if the pass ended now; below 0 where too many have."""
        return round(self.ratio * self.total) - self.gone

    def choose(self, size: int, *, stays: bool = False) -> int:
        """Return how many of the next ``size`` bytes go; none where it is known that they stay."""
        self.sizes.append(size)
        self.total += size
        going = 0 if stays or size <= self.small else self._going(size)
        self.gone += going
        return going

    def _going(self, size: int) -> int:
        due, slack = self.ratio * self.expected - self.gone, TOLERANCE * self.expected
        if self._last is None:
            return size if 2 * due >= size else 0
        if 0 < due >= size - slack:  # of a ratio of 0 nothing goes, be it within the tolerance
            return size
        return 0 if due <= slack else piece_of(due)


def piece_of(count: float) -> int:
    """Return ``count`` bytes in whole pieces."""
    return int(count) // PIECE * PIECE


class TagHistory:
    """What is known of one tag: of its last pass ``sizes``, null before the first has ended.

    ``stores`` hold what is away, for each way (which target, from which device), with the settings that they are for.
    """

    def __init__(self) -> None:
        self.sizes: SavedSizes | None = None
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.stores: dict[tuple[str, torch.device], tuple[object, AnyStore]] = {}
        self._lives_with_model = False

    def learn(self, sizes: list[int], storages: dict[int, weakref.ref[torch.UntypedStorage]]) -> None:
        """Remember a pass that is over."""
        self.sizes, self._storages = SavedSizes.of(sizes), storages

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` was there in the last pass, and no operation of the model has made it.

        Such are buffers, the data of parameters, and inputs that the caller keeps: moving them would free nothing.
        """
        storage = tensor.untyped_storage()
        reference = self._storages.get(storage._cdata)
        return tensor.grad_fn is None and reference is not None and reference() is storage

    def live_with(self, tag: str, parameter: torch.Tensor) -> None:
        """Be forgotten when ``parameter`` is gone."""
        if not self._lives_with_model:
            self._lives_with_model = True
            weakref.finalize(parameter, _forget, tag, weakref.ref(self)).atexit = False

    def trim(self) -> None:
        """Give back memory and files that the last passes didn't use."""
        for _, store in self.stores.values():
            store.trim()


@dataclass(frozen=True, slots=True)
class Destination:
    """What is saved on ``device`` of ``devices``, or on whatever accelerator it lies, goes to ``target``.

    Files lie in ``folder``; null: in the system's for temporary files. The memory and the files belong to ``history``.
    """

    target: str
    folder: Path | None
    devices: Devices
    device: DeviceId
    history: TagHistory

    @property
    def ledger(self) -> Ledger | None:
        """The ledger that counts what stays, if the device is simulated."""
        return self.devices.ledger(self.device)

    def store(self, where: torch.device) -> AnyStore | None:
        """Return what puts away the bytes that lie on ``where``; null if nothing would be gained."""
        device: DeviceId = where.index or 0
        if where.type == "cpu":
            device = CPU if self.ledger is None else self.device
        if self.target == "host" and device == CPU:
            say_that_nothing_goes()
            return None
        way, settings = (self.target, where), (self.ledger, self.folder)
        if way not in self.history.stores or self.history.stores[way][0] != settings:
            self.history.stores[way] = settings, self._open(device)
        return self.history.stores[way][1]

    def _open(self, device: DeviceId) -> AnyStore:
        if self.target == "host":
            return open_host_store(self.devices, device)
        return open_disk_store(self.devices, device, self.folder or Path(tempfile.gettempdir()))


@functools.cache
def say_that_nothing_goes() -> None:
    """Say once that activations of the host can't be offloaded to the host."""
    _log.warning("CPUOffload: activations of a model on the host stay there; target='disk' offloads them")


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
