"""Saved bytes of an accelerator wait on the host, in memory that is registered with it and used again by every pass.

Copies out and copies back are asked for on a link each, so on a CUDA device each way has a stream of its own, and both
go on while it computes. Nothing here waits for the device: what is computed later is put behind the copies that it
needs (``Link.follow``), and the allocator of the device goes by the same order. On a simulated accelerator, and on one
that there are no streams for, a copy is done when it was asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from offstage.stages.dispatch.transfer.arena import HostMemory
from offstage.stages.dispatch.transfer.link import Event, Link, pin
from offstage.stages.dispatch.transfer.links import open_link
from offstage.stages.dispatch.transfer.trace import Trace
from offstage.stages.finetune.swap import GrowingArena, span
from offstage.stages.machine.aligned_memory import Bytes, align_up, private_bytes
from offstage.stages.machine.devices import Devices, full
from offstage.stages.units import DeviceId

Rooms = Callable[[int], torch.Tensor]


class HostSwap:
    """Puts bytes away over the link ``out`` and has them back over ``back``, into memory from ``rooms``."""

    def __init__(self, out: Link, back: Link, rooms: Rooms) -> None:
        self.out, self.back, self._rooms = out, back, rooms
        self._arena: GrowingArena[torch.Tensor] = GrowingArena()
        self._lock = threading.Lock()

    def put(self, source: torch.Tensor, trace: Trace | None) -> AwayOnHost:
        """Ask for the copy of ``source``."""
        with self._lock:
            copy = self._take(source.nbytes)[: source.nbytes]
        with span(trace, "out", "copy", source.nbytes):
            copied = self.out.copy(source, copy, after=self.out.computed())
        return AwayOnHost(self, copy, copied, trace)

    def _take(self, size: int) -> torch.Tensor:
        region = self._arena.take(size)
        if region is None:
            self._arena.grow(HostMemory(self._arena.wanted(align_up(size)), self._registered))
            region = self._arena.take(size)
        assert region is not None
        return region

    def _registered(self, size: int) -> Bytes:
        """Return bytes of the host that the accelerator knows for as long as they are there."""
        found = private_bytes(align_up(size))
        pin(self.out, found)
        return found

    def room(self, size: int) -> torch.Tensor:
        """Return memory of the device."""
        return self._rooms(size)

    def trim(self) -> None:
        """Give back memory that no longer is used."""
        with self._lock:
            self._arena.trim()


class AwayOnHost:
    """Bytes on the host, ``copied`` there when that event has happened."""

    def __init__(self, swap: HostSwap, copy: torch.Tensor, copied: Event, trace: Trace | None) -> None:
        self._swap, self._copy, self._copied, self._trace = swap, copy, copied, trace

    @property
    def leaving(self) -> bool:
        """Whether the copy may still be under way."""
        return self._copied is not None

    def settle(self) -> None:
        """Put what is computed from now on behind the copy."""
        if self._copied is not None:
            self._swap.out.follow(self._copied)
            self._copied = None

    def fetch(self, target: torch.Tensor) -> FetchFromHost:
        """Ask for the copy into ``target``, behind what its memory was used for before."""
        self.settle()
        back = self._swap.back
        with span(self._trace, "back", "copy", target.nbytes):
            done = back.copy(self._copy, target, after=back.computed())
        return FetchFromHost(back, done, (self._copy, target))


class FetchFromHost:
    """A copy back that is under way, and both its ends, which live until it is done."""

    def __init__(self, link: Link, done: Event, ends: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._link, self._done, self._ends = link, done, ends

    def finish(self) -> None:
        """Put what is computed from now on behind the copy."""
        if self._done is not None:
            self._link.follow(self._done)
            self._done = None

    def __del__(self) -> None:
        """Wait for a copy that nobody wanted after all: its memory goes to others now, which don't know of it."""
        if self._done is not None:
            self._link.finish(self._done)


def open_host_swap(devices: Devices, device: DeviceId) -> HostSwap:
    """Return the swap of the accelerator ``device``."""
    return HostSwap(open_link(devices, device), open_link(devices, device), rooms_on(devices, device))


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
