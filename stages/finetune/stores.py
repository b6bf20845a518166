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
from typing import Generic, Protocol, TypeVar

import torch

from offstage.stages.dispatch.transfer.arena import Arena, HostMemory, Memory
from offstage.stages.dispatch.transfer.link import Event, Link, pin
from offstage.stages.dispatch.transfer.links import open_link
from offstage.stages.dispatch.transfer.trace import Trace
from offstage.stages.machine.aligned_memory import Bytes, align_up, private_bytes
from offstage.stages.machine.devices import Devices, full
from offstage.stages.units import DeviceId

Lent = TypeVar("Lent")
Rooms = Callable[[int], torch.Tensor]
"""Gives so many bytes of a device, flat; a ``BudgetError`` where it is full."""

_LEAST_BYTES = 2**20
_IDLE_PASSES = 8
"""After how many passes memory that isn't used is given back: to register it again takes longer than a pass."""


def span(trace: Trace | None, way: str, category: str, size: int) -> AbstractContextManager[None]:
    """Return a context whose time is in ``trace`` as activations that go a ``way``: out or back."""
    return trace.span(f"activations {way}", category, bytes=size) if trace else nullcontext()


class Parcel(Protocol):
    """Bytes that were put away; their room is free again when this object is gone."""

    @property
    def leaving(self) -> bool:
        """Whether the source is still needed."""

    def settle(self) -> None:
        """Have all that is computed from now on begin after the source was copied, so that it may be let go."""

    def fetch(self, target: torch.Tensor) -> None:
        """Start filling ``target``, a room of the same store, or the first bytes of one."""

    def finish(self) -> None:
        """Have all that is computed from now on find what was fetched there; finishing twice does nothing."""


class ActivationStore(ABC, Generic[Lent]):
    """Puts bytes of one device away, which come back into memory from ``rooms``.

    They lie in as many memories as are needed, each as large as all before it, whose regions are used again and again:
    passes that save the same take the same.
    """

    def __init__(self, rooms: Rooms) -> None:
        self.room = rooms
        self._arenas: list[Arena[Lent]] = []
        self._idle: list[int] = []  # of each, for how many passes nothing was in it
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """The bytes of all memories."""
        return sum(arena.size for arena in self._arenas)

    @abstractmethod
    def put(self, source: torch.Tensor, trace: Trace | None) -> Parcel:
        """Put the bytes ``source`` (flat, uint8) away; ``trace`` gets what that takes, and what fetching them does."""

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
            kept = [(arena, count) for arena, count in zip(self._arenas, idle, strict=True) if count < _IDLE_PASSES]
            self._arenas, self._idle = [arena for arena, _ in kept], [count for _, count in kept]


class HostStore(ActivationStore[torch.Tensor]):
    """Puts bytes away on the host over the link ``out`` and has them back over ``back``."""

    def __init__(self, out: Link, back: Link, rooms: Rooms) -> None:
        super().__init__(rooms)
        self.out, self.back = out, back

    def put(self, source: torch.Tensor, trace: Trace | None) -> HostParcel:
        """Ask for the copy of ``source``."""
        copy = self.take(align_up(source.nbytes))[: source.nbytes]
        with span(trace, "out", "copy", source.nbytes):
            copied = self.out.copy(source, copy, after=self.out.computed())
        return HostParcel(self, copy, copied, trace)

    def _memory(self, size: int, *, least: int) -> HostMemory:
        return HostMemory(size, self._registered)

    def _registered(self, size: int) -> Bytes:
        """Return bytes of the host that the accelerator knows for as long as they are there."""
        found = private_bytes(align_up(size))
        pin(self.out, found)
        return found


class HostParcel:
    """Bytes on the host, ``copied`` there when that event has happened."""

    def __init__(self, store: HostStore, copy: torch.Tensor, copied: Event, trace: Trace | None) -> None:
        self._store, self._copy, self._copied, self._trace = store, copy, copied, trace
        self._done: Event = None
        self._target: torch.Tensor | None = None  # lives until the copy back is done

    @property
    def leaving(self) -> bool:
        """Whether the copy may still be under way."""
        return self._copied is not None

    def settle(self) -> None:
        """Put what is computed from now on behind the copy."""
        if self._copied is not None:
            self._store.out.follow(self._copied)
            self._copied = None

    def fetch(self, target: torch.Tensor) -> None:
        """Ask for the copy into ``target``, behind what its memory was used for before."""
        self.settle()
        back = self._store.back
        with span(self._trace, "back", "copy", target.nbytes):
            self._done = back.copy(self._copy, target, after=back.computed())
        self._target = target

    def finish(self) -> None:
        """Put what is computed from now on behind the copy back."""
        if self._done is not None:
            self._store.back.follow(self._done)
        self._done = self._target = None

    def __del__(self) -> None:
        """Wait for a copy that nobody wanted after all: its memory goes to others now, which don't know of it."""
        if self._done is not None:
            self._store.back.finish(self._done)


def open_host_store(devices: Devices, device: DeviceId) -> HostStore:
    """Return the store on the host for the accelerator ``device``."""
    return HostStore(open_link(devices, device), open_link(devices, device), rooms_on(devices, device))


def rooms_on(devices: Devices, device: DeviceId, *, alignment: int = 1) -> Rooms:
    """Return what gives memory of ``device``: flat bytes; on the host it begins at a page, and behind it there is more
    up to a multiple of ``alignment``.
    """
    ledger, where = devices.ledger(device), devices.torch_device(device)

    def room(size: int) -> torch.Tensor:
        with torch.inference_mode(False):
            if where.type != "cpu":
                return _allocated(size, where)
            whole = align_up(size, alignment)
            memory = private_bytes(whole) if ledger is None else ledger.allocate(whole)
            return torch.frombuffer(memory, dtype=torch.uint8)[:size]

    return room


def _allocated(size: int, where: torch.device) -> torch.Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, device=where)
    except torch.OutOfMemoryError as error:
        raise full(where.index, size) from error
