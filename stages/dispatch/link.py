"""The link: what the pipeline needs to know of an accelerator.

All work for an accelerator is asked for and done later, in one order for computing and in another for copies. What
ties the two orders together are events: computing that was asked for after ``follow`` begins when the event has
happened, and a copy begins when the event ``after`` has. Neither waiting stops the thread that asks.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from stages.dispatch.arena import Memory
from stages.shard_load.devices import Devices, Ledger
from stages.shard_load.memory import Bytes
from stages.units import DeviceId, format_bytes

_log = logging.getLogger(__name__)

DEVICE_ALIGNMENT = 512
"""Where a tensor begins on an accelerator, as in torch's own memory there: kernels are chosen by the alignment too."""

Event = object | None
"""A moment in the order of an accelerator's work; each link knows its own kind."""


class Link(Protocol):
    """One accelerator, as the pipeline that brings weights there sees it."""

    def memory(self, size: int) -> Memory[torch.Tensor]:
        """Return ``size`` bytes of the accelerator's memory; a ``BudgetError`` where it is full."""

    def computed(self) -> Event:
        """Return the moment when all is computed that was asked for by now; for the thread that runs the model."""

    def follow(self, event: Event) -> None:
        """Have all that is computed from now on begin after ``event``; for the thread that runs the model."""

    def copy(self, source: torch.Tensor, target: torch.Tensor, *, after: Event) -> Event:
        """Have ``source`` (bytes on the host) copied into ``target`` after ``after``; return when it is done.

        Copies are done in the order in which they were asked for. Until it is done, ``source`` must stay as it is.
        """

    def finish(self, event: Event) -> None:
        """Wait here until ``event`` has happened; never in the thread that runs the model, but to close."""

    def register(self, memory: Bytes) -> bool:
        """Make ``memory`` known to the accelerator, so that it copies from there by itself; return whether it did."""

    def unregister(self, address: int) -> None:
        """Undo ``register`` for the memory at ``address``."""

    def close(self) -> None:
        """Wait until the accelerator has done all that was asked of it."""


class LedgerMemory:
    """Memory of a simulated accelerator: on the host, and counted in its ledger."""

    alignment = DEVICE_ALIGNMENT

    def __init__(self, ledger: Ledger, size: int) -> None:
        self.size = size
        self._bytes = ledger.allocate(size)

    def lend(self, begin: int, length: int) -> tuple[torch.Tensor, object]:
        """Return the region at ``begin``: a tensor with a storage of its own, which keeps the array alive."""
        region = self._bytes[begin : begin + length]
        with torch.inference_mode(False):  # or no other thread could copy into it
            return torch.frombuffer(region, dtype=torch.uint8), region


class FreshMemory:
    """Memory of an accelerator of any kind, allocated anew for each region; ``size`` is how much there may be."""

    alignment = DEVICE_ALIGNMENT

    def __init__(self, device: torch.device, size: int) -> None:
        self.size, self._device = size, device

    def lend(self, begin: int, length: int) -> tuple[torch.Tensor, object]:
        """Return ``length`` bytes, wherever the allocator has them."""
        with torch.inference_mode(False):
            region = torch.empty(length, dtype=torch.uint8, device=self._device)
        return region, region.untyped_storage()


class SynchronousLink:
    """A link on which all that is asked for is done at once, so that there is nothing to wait for.

    That is how a simulated accelerator works, and how one is served that there are no streams for.
    """

    def __init__(self, memory: Callable[[int], Memory[torch.Tensor]]) -> None:
        self._memory = memory

    def memory(self, size: int) -> Memory[torch.Tensor]:
        """Return ``size`` bytes of the accelerator's memory."""
        return self._memory(size)

    def computed(self) -> Event:
        """Return now."""
        return None

    def follow(self, event: Event) -> None:
        """Do nothing: it has happened."""

    def copy(self, source: torch.Tensor, target: torch.Tensor, *, after: Event) -> Event:
        """Copy now."""
        target.copy_(source)
        return None

    def finish(self, event: Event) -> None:
        """Do nothing: it has happened."""

    def register(self, memory: Bytes) -> bool:
        """Do nothing: the host does the copying."""
        return True

    def unregister(self, address: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing: all is done."""


def open_link(devices: Devices, device: DeviceId) -> Link:
    """Return the link to the accelerator ``device``."""
    ledger, there = devices.ledger(device), devices.torch_device(device)
    if ledger is not None:
        return SynchronousLink(lambda size: LedgerMemory(ledger, size))
    if there.type != "cuda":
        return SynchronousLink(lambda size: FreshMemory(there, size))
    from stages.dispatch.cuda_link import CudaLink

    return CudaLink(there)


def pin(link: Link, memory: Bytes) -> Callable[[], object]:
    """Register ``memory`` until the function that is returned is called, or the memory is gone.

    Where the system refuses, copies from there are slower and stop the thread that asks for them; the log says so.
    """
    if not link.register(memory):
        _log.warning(
            "%s of host memory can't be registered with the accelerator; copies from there will be slower",
            format_bytes(memory.nbytes),
        )
        return lambda: None
    undo = weakref.finalize(memory, link.unregister, memory.ctypes.data)
    undo.atexit = False  # the process's end is the memory's
    return undo
