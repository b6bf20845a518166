"""What rests packed crosses the link as it rests, and is unpacked on the accelerator, beside the copies.

A block comes into a landing, a piece of the accelerator's memory that is free again once the block is unpacked. There
are a few of them, so that one comes while another one is unpacked. What waits on disk is read into a pinned buffer
first, what waits in memory is copied from where it is.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeGuard

import torch

from offstage.stages.checkpoints.device_codec import (
    LANDINGS,
    DeviceCodec,
    block_scratch,
    can_unpack,
    device_bytes,
    landing_bytes,
)
from offstage.stages.checkpoints.open_files import OpenFiles
from offstage.stages.checkpoints.packed import MemoryFile, PackedBlock, PackedTensor
from offstage.stages.checkpoints.packed_reads import read_block
from offstage.stages.dispatch.transfer.link import Event, Link, Moved, pin
from offstage.stages.dispatch.transfer.pinned_buffers import PinnedBuffers
from offstage.stages.machine.aligned_memory import align_up, buffer_bytes
from offstage.stages.units import DEVICE_ALIGNMENT


@dataclass(slots=True)
class _Landing:
    """Device memory for a block at rest, and when what was unpacked from there was done."""

    memory: torch.Tensor
    free: Event = None


class DeviceUnpacker:
    """Unpacks ``tensors``, whose codecs can do it there, behind ``link``."""

    def __init__(self, link: Link, tensors: Sequence[PackedTensor]) -> None:
        self._link = link
        tables = {id(table): table for tensor in tensors for table in _codec(tensor).tables(tensor)}
        landing = max(landing_bytes(block) for tensor in tensors for block in tensor.codec.blocks(tensor))
        sizes = [align_up(table.nbytes, DEVICE_ALIGNMENT) for table in tables.values()]
        memory = link.memory(LANDINGS * landing + sum(sizes))
        self._landings = deque(_Landing(memory.lend(place * landing, landing)[0]) for place in range(LANDINGS))
        self._staged = buffer_bytes(sum(sizes))
        self._unpin = pin(link, self._staged) if tables else lambda: None
        self._tables: dict[int, torch.Tensor] = {}
        begin, after = 0, link.computed()
        for (key, table), size in zip(tables.items(), sizes, strict=True):
            source = torch.from_numpy(self._staged[begin : begin + table.nbytes]).view(table.dtype).copy_(table)
            table_memory = memory.lend(LANDINGS * landing + begin, table.nbytes)[0]
            link.copy(
                [(source.view(torch.uint8), table_memory)], after=after
            )  # before all blocks, so nobody else waits
            self._tables[key] = table_memory.view(table.dtype)
            begin += size
        self._lock = threading.Lock()

    def bring(
        self,
        tensor: PackedTensor,
        block: PackedBlock,
        target: Callable[[], torch.Tensor],
        *,
        after: Event,
        files: OpenFiles,
        buffers: PinnedBuffers | None,
    ) -> Moved:
        """Have ``block`` be unpacked to its place in ``target``, the bytes of ``tensor``, after ``after``.

        Runs in a thread that reads: from ``files``, by way of ``buffers``.
        """
        in_memory = [span.file.tensor_of(span) for span in block.spans if isinstance(span.file, MemoryFile)]
        if len(in_memory) == len(block.spans):
            return self._pass_on(tensor, block, in_memory, target(), after=after)[0]
        assert buffers is not None
        with buffers.lend() as buffer:
            parts, stored = read_block(files, block, buffer.memory)
            data = [torch.from_numpy(part) for part in parts]
            unpacking, copied = self._pass_on(tensor, block, data, target(), after=after)
            buffer.note_copy(self._link, copied)
        return unpacking._replace(stored_bytes=stored)

    def _pass_on(
        self,
        tensor: PackedTensor,
        block: PackedBlock,
        data: Sequence[torch.Tensor],
        target: torch.Tensor,
        *,
        after: Event,
    ) -> tuple[Moved, Event]:
        """Have ``data`` copied to a landing and unpacked from there; with it, return when the copies are done."""
        codec = _codec(tensor)
        tables = [self._tables[id(table)] for table in codec.tables(tensor)]
        begins = accumulate((align_up(part.nbytes, DEVICE_ALIGNMENT) for part in data), initial=0)
        with self._lock:  # what is copied to a landing waits for what was unpacked from there before
            landing = self._landings[0]
            self._landings.rotate(1)
            landed = [landing.memory[begin : begin + part.nbytes] for begin, part in zip(begins, data, strict=False)]
            copied = self._link.copy([*zip(data, landed, strict=True)], after=landing.free or after)
            landing.free = self._link.unpack(
                lambda landed, target: codec.unpack_on_device(tensor, block, landed, tables, target),
                landed,
                target,
                after=(copied, after),
                scratch_bytes=block_scratch(codec, tensor, block),
            )
            return Moved(landing.free, sum(map(len, data))), copied

    def close(self) -> None:
        """Free the memory, once the link is closed; closing again does nothing."""
        self._landings.clear()
        self._tables.clear()
        self._unpin()


def open_unpacker(link: Link, tensors: Iterable[PackedTensor], *, room: int) -> DeviceUnpacker | None:
    """Return what unpacks those of ``tensors`` behind ``link`` that can be, if ``room`` bytes there suffice for it."""
    capable = [tensor for tensor in tensors if can_unpack(tensor)]
    return DeviceUnpacker(link, capable) if 0 < device_bytes(capable) <= room else None


def crosses_packed(source: object, unpacker: DeviceUnpacker | None) -> TypeGuard[PackedTensor]:
    """Return whether what waits at ``source`` crosses the link as it rests, for ``unpacker`` to unpack it there."""
    return unpacker is not None and isinstance(source, PackedTensor) and can_unpack(source)


def _codec(tensor: PackedTensor) -> DeviceCodec:
    assert isinstance(tensor.codec, DeviceCodec)
    return tensor.codec
