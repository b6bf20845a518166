"""Where saved bytes go and come back from: an ``ActivationStore`` for each target gives a ``Parcel`` for what it gets.

Bytes that are put away may still be on their way out while the caller goes on: until then their source must stay as it
is. And they are fetched ahead of use, so what is asked for and what is there are two things.

Saved bytes of an accelerator wait on the host, in memory that is registered with it and used again by every pass.
Copies out and copies back are asked for on a link each, so on a CUDA device each way has a stream of its own, and both
go on while it computes. Nothing here waits for the device: what is computed later is put behind the copies that it
needs (``Link.follow``), and the allocator of the device goes by the same order. On a simulated accelerator, and on one
that there are no streams for, a copy is done when it was asked for.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Generic, TypeVar

import torch

from offstage.stages.dispatch.transfer.arena import Arena, HostMemory, Memory
from offstage.stages.dispatch.transfer.link import CopyBack, Link, pin
from offstage.stages.dispatch.transfer.links import open_link
from offstage.stages.dispatch.transfer.trace import Trace
from offstage.stages.machine.aligned_memory import Bytes, TensorRoom, align_up, private_bytes
from offstage.stages.machine.devices import Devices
from offstage.stages.units import DeviceId

Lent = TypeVar("Lent")
Follow = Callable[[], object]
"""Has all that is computed from now on come after some copies: behind them on the device, or waiting for them here."""

_LEAST_BYTES = 2**20
_IDLE_PASSES = 8
"""After how many passes memory that isn't used is given back: to register it again takes longer than a pass."""


def span(trace: Trace | None, way: str, category: str, size: int) -> AbstractContextManager[None]:
    """Return a context whose time is in ``trace`` as activations that go a ``way``: out or back."""
    return trace.span(f"activations {way}", category, bytes=size) if trace else nullcontext()


class Parcel(Generic[Lent]):
    """Bytes of which the first ``gone`` were put into ``store``; those behind them stayed, in memory of their own.

    What is fetched is all of them, in one ``room``; whoever sets that to null may fetch them again. What they take of
    the store is free again when this object is gone. ``trace`` gets the ways out and back.
    """

    def __init__(self, store: ActivationStore[Lent], source: torch.Tensor, gone: int, *, trace: Trace | None) -> None:
        self.size, self.gone = source.nbytes, gone
        self._store, self._trace = store, trace
        stays = self.size - gone
        self._rest = store.room(stays).tensor.copy_(source[gone:]) if stays else None
        self._region = store.take(align_up(gone))
        self.room: torch.Tensor | None = None
        self._moving = store.send(source[:gone], self._region, trace)

    @property
    def is_leaving(self) -> bool:
        """Whether the source is still needed: until this is ``ready``."""
        return self._moving is not None and self.room is None

    def fetch(self) -> None:
        """Start bringing the bytes back; a ``BudgetError`` where there is no room for them."""
        self.ready()
        room = self._store.room(self.size)
        self._moving = self._store.fetch(self._region, room, self.gone, trace=self._trace)
        self.room = room.tensor

    def ready(self) -> None:
        """Have all that is computed from now on find the bytes where they were asked to be: away, or in the ``room``.

        So then the source may be let go, or the room be used. What is ready is so again for nothing.
        """
        if self._moving is None:
            return
        self._moving()
        self._moving = None
        if self.room is not None and self._rest is not None:
            self.room[self.gone :].copy_(self._rest)  # now: whole pages are read, the last beyond what had gone


class ActivationStore(ABC, Generic[Lent]):
    """Puts bytes of ``device`` of ``devices`` away, which come back into new memory there.

    They lie in as many memories as are needed, each as large as all before it, whose regions are used again and again:
    passes that save the same take the same.
    """

    def __init__(self, devices: Devices, device: DeviceId) -> None:
        self._devices, self._device = devices, device
        self._arenas: list[Arena[Lent]] = []
        self._idle: list[int] = []  # of each, for how many passes nothing was in it
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """The bytes of all memories."""
        return sum(arena.size for arena in self._arenas)

    def put(self, source: torch.Tensor, gone: int, trace: Trace | None) -> Parcel[Lent]:
        """Put the first ``gone`` bytes of ``source`` (flat, uint8) away; the others move, so that it can be freed."""
        return Parcel(self, source, gone, trace=trace)

    def room(self, size: int) -> TensorRoom:
        """Return so many bytes of the device, flat; a ``BudgetError`` where it is full."""
        with torch.inference_mode(False):  # or no other thread could copy into it
            return self._devices.room((size,), torch.uint8, self._device)

    @abstractmethod
    def send(self, source: torch.Tensor, region: Lent, trace: Trace | None) -> Follow | None:
        """Start copying ``source`` into ``region``; return what has others come after that, null if it is done."""

    @abstractmethod
    def fetch(self, region: Lent, room: TensorRoom, size: int, *, trace: Trace | None) -> Follow:
        """Start copying the first ``size`` bytes of ``region`` into ``room``; return what has others come after that.

        Whole pages may be written, to the end of the memory of ``room``. It lives until the copies are done.
        """

    @abstractmethod
    def _memory(self, size: int, *, least: int) -> Memory[Lent]:
        """Return new memory of ``size`` bytes, or of ``least`` where there is no room for more."""

    def take(self, size: int) -> Lent:
        """Return a region of ``size`` bytes or a little more."""
        with self._lock:
            region = self._find(size)
            if region is None:
                self._arenas.append(Arena(self._memory(max(size, self.size, _LEAST_BYTES), least=size)))
                self._idle.append(0)
                region = self._find(size)
        assert region is not None
        return region

    def _find(self, size: int) -> Lent | None:
        taken = (region for arena in self._arenas if (region := arena.take(size)) is not None)
        return next(taken, None)

    def trim(self) -> None:
        """Let go of memories that nothing lay in at the ends of several passes, of which this is one."""
        with self._lock:
            idle = [0 if arena.used else before + 1 for arena, before in zip(self._arenas, self._idle, strict=True)]
            in_use = [(arena, count) for arena, count in zip(self._arenas, idle, strict=True) if count < _IDLE_PASSES]
            self._arenas, self._idle = [arena for arena, _ in in_use], [count for _, count in in_use]


class HostStore(ActivationStore[torch.Tensor]):
    """Puts bytes away on the host over the link ``out`` and has them back over ``back``."""

    def __init__(self, devices: Devices, device: DeviceId, *, out: Link, back: Link) -> None:
        super().__init__(devices, device)
        self._out, self._back = out, back

    def send(self, source: torch.Tensor, region: torch.Tensor, trace: Trace | None) -> Follow | None:
        """Ask for the copy of ``source``."""
        with span(trace, "out", "copy", source.nbytes):
            copied = self._out.copy([(source, region[: source.nbytes])], after=self._out.computed())
        return None if copied is None else partial(self._out.follow, copied)

    def fetch(self, region: torch.Tensor, room: TensorRoom, size: int, *, trace: Trace | None) -> Follow:
        """Ask for the copy into ``room``, behind what its memory was used for before."""
        with span(trace, "back", "copy", size):
            return CopyBack(self._back, region[:size], room.tensor[:size]).follow

    def _memory(self, size: int, *, least: int) -> HostMemory:
        return HostMemory(size, self._registered)

    def _registered(self, size: int) -> Bytes:
        """Return bytes of the host that the accelerator knows for as long as they are there."""
        memory = private_bytes(align_up(size))
        pin(self._out, memory)
        return memory


def open_host_store(devices: Devices, device: DeviceId) -> HostStore:
    """Return the store on the host for the accelerator ``device``."""
    return HostStore(devices, device, out=open_link(devices, device), back=open_link(devices, device))
