"""The link to each kind of accelerator: what a new kind adds itself to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from offstage.stages.dispatch.transfer.arena import HostMemory, Memory
from offstage.stages.dispatch.transfer.link import Event, Link, Operators, Piece
from offstage.stages.machine.aligned_memory import outside_inference
from offstage.stages.machine.caching_allocator import UNPACKING
from offstage.stages.machine.devices import Devices
from offstage.stages.machine.operator_threads import alone
from offstage.stages.units import DEVICE_ALIGNMENT, DeviceId


class FreshMemory:
    """Memory of an accelerator of any kind, allocated anew for each region; ``size`` is how much there may be."""

    alignment = DEVICE_ALIGNMENT

    def __init__(self, device: torch.device, size: int) -> None:
        self.size, self._device = size, device

    def lend(self, begin: int, length: int) -> tuple[torch.Tensor, object]:
        """Return ``length`` bytes, wherever the allocator has them."""
        with outside_inference():
            region = torch.empty(length, dtype=torch.uint8, device=self._device)
        return region, region.untyped_storage()


class SynchronousLink(Link):
    """A link on which all that is asked for is done at once, so that there is nothing to wait for.

    That is how a simulated accelerator works, and how one is served that there are no streams for.
    """

    in_place = False

    def __init__(
        self,
        memory: Callable[[int], Memory[torch.Tensor]],
        scratch: Callable[[int], Memory[torch.Tensor]] | None = None,
    ) -> None:
        self._memory, self._scratch = memory, scratch or memory

    def memory(self, size: int) -> Memory[torch.Tensor]:
        """Return ``size`` bytes of the accelerator's memory."""
        return self._memory(size)

    def computed(self) -> Event:
        """Return now."""
        return None

    def copy(self, pieces: Sequence[Piece], *, after: Event, urgent: bool = False) -> Event:
        """Copy now."""
        for source, target in pieces:
            target.copy_(source)
        return None

    def unpack(
        self,
        operators: Operators,
        data: Sequence[torch.Tensor],
        target: torch.Tensor,
        *,
        after: Sequence[Event],
        scratch_bytes: int,
    ) -> Event:
        """Unpack now, in this thread alone; a ledger counts what the operators take meanwhile."""
        scratch = self._scratch(max(1, scratch_bytes))
        with alone():
            operators(data, target)
        del scratch
        return None


class HostLink(SynchronousLink):
    """A link to the host's own memory, over which nothing goes but experts' rows that can't be read where they lie."""

    in_place = True

    def __init__(self) -> None:
        super().__init__(HostMemory)

    def copy(self, pieces: Sequence[Piece], *, after: Event, urgent: bool = False) -> Event:
        """Copy now, in this thread alone: torch would start threads of its own in each of ours."""
        for source, target in pieces:
            np.copyto(target.numpy(), source.numpy())
        return None


def open_link(devices: Devices, device: DeviceId) -> Link:
    """Return the link to the accelerator ``device``."""
    ledger, torch_device = devices.ledger(device), devices.torch_device(device)
    if ledger is not None:
        apart = partial(HostMemory, allocate=partial(ledger.allocate, stream=UNPACKING), alignment=DEVICE_ALIGNMENT)
        return SynchronousLink(partial(HostMemory, allocate=ledger.allocate, alignment=DEVICE_ALIGNMENT), apart)
    if torch_device.type != "cuda":
        return SynchronousLink(partial(FreshMemory, torch_device))
    from offstage.stages.dispatch.transfer.cuda_link import CudaLink

    return CudaLink(torch_device)
