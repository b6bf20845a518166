"""What unpacks on each accelerator what comes to it packed: of the parts that it computes, and experts in slots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack

from offstage.stages.checkpoints.device_codec import can_unpack
from offstage.stages.checkpoints.memory_file import MemoryFile
from offstage.stages.checkpoints.packed import PackedTensor
from offstage.stages.dispatch.dispatch_plan import DispatchPlan
from offstage.stages.dispatch.streaming.bindings import Binding
from offstage.stages.dispatch.streaming.device_lookaheads import Links
from offstage.stages.dispatch.streaming.streamed_part import StreamedPart
from offstage.stages.dispatch.transfer.device_unpacker import DeviceUnpacker, open_unpacker
from offstage.stages.dispatch.transfer.link import pin
from offstage.stages.machine.aligned_memory import Bytes
from offstage.stages.shard_load.sources import DiskWeights
from offstage.stages.units import DeviceId


def open_unpackers(
    parts: Sequence[StreamedPart],
    experts: Mapping[str, Sequence[Binding]],
    plan: DispatchPlan,
    *,
    stored: DiskWeights,
    links: Links,
    stack: ExitStack,
) -> dict[DeviceId, DeviceUnpacker]:
    """Return the unpackers of the devices that ``plan`` gives room for one, until ``stack`` is closed.

    What waits for them in memory is pinned where it lies.
    """
    waiting: dict[DeviceId, list[PackedTensor]] = {device: [] for device in plan.unpacking}
    for part in parts:
        waiting.get(part.computes, []).extend(_packed_in(part.bindings, stored))
    for module, bindings in experts.items():
        waiting.get(plan.parts[module].execution, []).extend(_packed_in(bindings, stored))
    found: dict[DeviceId, DeviceUnpacker] = {}
    for device, tensors in waiting.items():
        if not links.devices.is_apart(device):
            continue
        unpacker = open_unpacker(links(device), tensors, room=plan.unpacking[device])
        if unpacker is not None:
            found[device] = unpacker
            stack.callback(unpacker.close)
            for memory in _memories(tensors):
                stack.callback(pin(links(device), memory))
    return found


def _packed_in(bindings: Iterable[Binding], stored: DiskWeights) -> Iterator[PackedTensor]:
    """Yield what rests packed of what is brought to ``bindings``: whole tensors, or an expert's part of one."""
    for binding in bindings:
        if binding.host is None:
            source = stored.sources[binding.name]
            rows = source.rows or (source.at,)
            yield from (place for row in rows for place in row if isinstance(place, PackedTensor))


def _memories(tensors: Iterable[PackedTensor]) -> list[Bytes]:
    """Return the pieces of memory in which those of ``tensors`` lie that devices unpack, each once."""
    files = (part.file for tensor in tensors if can_unpack(tensor) for part in tensor.parts)
    found = {file.memory.ctypes.data: file.memory for file in files if isinstance(file, MemoryFile)}
    return [memory for memory in found.values() if memory.nbytes]
