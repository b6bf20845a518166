"""What brings a model's weights to the devices that compute them: links, and what reads, pins and unpacks for these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from offstage.stages.checkpoints.device_codec import can_unpack
from offstage.stages.checkpoints.packed import MemoryFile, PackedTensor
from offstage.stages.dispatch.dispatch_plan import DispatchPlan
from offstage.stages.dispatch.streaming.places import TensorPlace, gather_on_host
from offstage.stages.dispatch.transfer.device_unpacker import DeviceUnpacker, open_unpacker
from offstage.stages.dispatch.transfer.link import Link, pin
from offstage.stages.dispatch.transfer.links import HostLink, open_link
from offstage.stages.dispatch.transfer.mover import Mover
from offstage.stages.dispatch.transfer.part_layout import Source
from offstage.stages.dispatch.transfer.pinned_buffers import PinnedBuffers
from offstage.stages.dispatch.transfer.trace import Trace
from offstage.stages.dispatch.transfer.traffic import Traffic
from offstage.stages.machine.aligned_memory import Bytes, HostBlock
from offstage.stages.machine.devices import Devices
from offstage.stages.shard_load.sources import DiskWeights
from offstage.stages.units import DeviceId, in_tier_order

OpenLink = Callable[[Devices, DeviceId], Link]


@dataclass(slots=True, eq=False)
class Transport:
    """The ways of one model's weights to ``devices``, as ``plan`` has it; ``stored`` has what waits on disk.

    Each link is opened once, by ``open``. All that is opened here is closed with ``stack``. ``unpackers`` are those of
    the accelerators that unpack what comes to them packed; ``traffic`` counts what comes.
    """

    plan: DispatchPlan
    stored: DiskWeights
    devices: Devices
    stack: ExitStack
    traffic: Traffic = field(default_factory=Traffic)
    trace: Trace | None = None
    open: OpenLink = open_link
    unpackers: dict[DeviceId, DeviceUnpacker] = field(default_factory=dict)
    _links: dict[DeviceId, Link] = field(default_factory=dict)

    @property
    def apart(self) -> list[DeviceId]:
        """The devices that compute something in memory of their own, in order."""
        computing = {part.execution for part in self.plan.parts.values()}
        return [device for device in in_tier_order(computing) if self.devices.is_apart(device)]

    def link(self, device: DeviceId) -> Link:
        """Return the link to ``device``."""
        if device not in self._links:
            self._links[device] = self.open(self.devices, device) if self.devices.is_apart(device) else HostLink()
            self.traffic.late.append(partial(self._count_stalls, device))
        return self._links[device]

    def _count_stalls(self, device: DeviceId) -> None:
        waited = self._links[device].stalled()
        if waited:
            self.traffic.count_stall(device, waited)

    def mover(self, device: DeviceId, sources: Iterable[Source], buffers: PinnedBuffers | None) -> Mover:
        """Return what brings ``sources`` to ``device``, by way of ``buffers``; whoever asks closes it."""
        return Mover(
            self.link(device),
            sources,
            device=device,
            buffers=buffers,
            unpacker=self.unpackers.get(device),
            traffic=self.traffic,
            trace=self.trace.of(device) if self.trace is not None else None,
        )

    def pin(self, waiting: Mapping[DeviceId, Sequence[TensorPlace]], host: HostBlock | None) -> None:
        """Have what waits on the host wait in memory that the accelerators copy from by themselves, whichever it is.

        ``waiting`` are the places of what is brought to each device. The memory is ``host``, if anything lies there,
        and memory of its own for the rest.
        """
        apart = [device for device in waiting if self.devices.is_apart(device)]
        places = [place for device in apart for place in waiting[device]]
        for block in gather_on_host(places, host) if apart else ():
            self.stack.callback(pin(self.link(apart[0]), block.memory))

    def open_unpackers(self, waiting: Mapping[DeviceId, Sequence[TensorPlace]]) -> None:
        """Open the unpackers of the devices that the plan gives room for one; what they unpack is in ``waiting``.

        What waits for them in memory is pinned where it lies.
        """
        for device, room in self.plan.unpacking.items():
            tensors = list(_packed_in(waiting.get(device, ()), self.stored))
            apart = self.devices.is_apart(device)
            unpacker = open_unpacker(self.link(device), tensors, room=room) if apart else None
            if unpacker is not None:
                self.unpackers[device] = unpacker
                self.stack.callback(unpacker.close)
                for memory in _memories(tensors):
                    self.stack.callback(pin(self.link(device), memory))


def _packed_in(places: Iterable[TensorPlace], stored: DiskWeights) -> Iterator[PackedTensor]:
    """Yield what rests packed of what is brought to ``places``: whole tensors, or an expert's part of one."""
    for place in places:
        if place.host is None:
            source = stored.sources[place.name]
            rows = source.rows or (source.at,)
            yield from (part for row in rows for part in row if isinstance(part, PackedTensor))


def _memories(tensors: Iterable[PackedTensor]) -> list[Bytes]:
    """Return the pieces of memory in which those of ``tensors`` lie that devices unpack, each once."""
    files = (part.file for tensor in tensors if can_unpack(tensor) for part in tensor.parts)
    memories = {file.memory.ctypes.data: file.memory for file in files if isinstance(file, MemoryFile)}
    return [memory for memory in memories.values() if memory.nbytes]
