"""What is remembered from one iteration to the next.

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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offstage.stages.finetune.disk_store import DiskStore
from offstage.stages.finetune.offload_choice import SavedSizes
from offstage.stages.finetune.saved_span import SavedSpan, SpanKey, key_of
from offstage.stages.finetune.stores import ActivationStore, open_host_store, rooms_on
from offstage.stages.machine.aligned_memory import ALIGNMENT
from offstage.stages.machine.devices import Devices, Ledger
from offstage.stages.units import CPU, DeviceId

_log = logging.getLogger("offstage")

AnyStore = ActivationStore[Any]

_HISTORIES: dict[str, TagHistory] = {}
_SPANS: weakref.WeakValueDictionary[SpanKey, SavedSpan] = weakref.WeakValueDictionary()
"""All that is saved now, under whichever tag."""
_MOST_TAGS = 1024
"""Of more than that, those that weren't used for longest are forgotten: some program makes a new one each time."""
_LOCK = threading.Lock()


class TagHistory:
    """What is known of one tag: of its last pass ``sizes``, null before the first has ended, and its stores."""

    def __init__(self) -> None:
        self.sizes: SavedSizes | None = None
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._stores: dict[tuple[str, torch.device], tuple[object, AnyStore]] = {}
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
    def stores(self) -> list[AnyStore]:
        """What holds what is away."""
        return [store for _, store in self._stores.values()]

    def store(self, way: tuple[str, torch.device], settings: object, make: Callable[[], AnyStore]) -> AnyStore:
        """Return the store for a ``way`` (which target, from which device), new if its ``settings`` are others."""
        known = self._stores.get(way)
        if known is None or known[0] != settings:
            known = self._stores[way] = (settings, make())
        return known[1]

    def trim(self) -> None:
        """Give back memory and files that the last passes didn't use."""
        for store in self.stores:
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
        make = functools.partial(self._open, device)
        return self.history.store((self.target, where), (self.ledger, self.folder), make)

    def _open(self, device: DeviceId) -> AnyStore:
        if self.target == "host":
            return open_host_store(self.devices, device)
        rooms = rooms_on(self.devices, device, alignment=ALIGNMENT)  # as direct reads fill it
        return DiskStore(self.folder or Path(tempfile.gettempdir()), rooms)


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


def find_span(tensor: torch.Tensor) -> tuple[SpanKey, SavedSpan | None]:
    """Return the memory that ``tensor`` stands for, and its span where that is saved already, as it is now."""
    key = key_of(tensor)
    span = _SPANS.get(key)
    return key, span if span is not None and span.is_of(tensor) else None


def remember_span(key: SpanKey, span: SavedSpan) -> None:
    """Have ``span`` found for as long as it lives."""
    _SPANS[key] = span
