"""Reading what waits on the host packed: the bytes as they rest on disk, which stay."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from offstage.stages.checkpoints.bulk_reader import BulkReader, TensorRead
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.packed import PackedTensor, in_memory
from offstage.stages.checkpoints.packed_reads import SMALL_SPAN_BYTES
from offstage.stages.machine.aligned_memory import (
    TENSOR_ALIGNMENT,
    Bytes,
    align_down,
    align_up,
    private_memory,
    tensor_in,
)

Sources = tuple[PackedTensor, ...]
"""What a tensor rests in: one, or the packed tensors that it is, one after the other."""


def read_at_rest(sources: Mapping[str, Sources], progress: Callable[[int], object]) -> dict[str, Sources]:
    """Return ``sources`` as they are once their bytes are in memory; ``progress`` is told of these as they come.

    What is of one name lies in one piece of memory.
    """
    placed = {
        name: _lay_out([part for tensor in tensors for part in tensor.parts]) for name, tensors in sources.items()
    }
    with BulkReader() as bulk:
        bulk.read([read for reads, _ in placed.values() for read in reads], progress)
    found: dict[str, Sources] = {}
    for name, tensors in sources.items():
        reads, memory = placed[name]
        data = (read.target.numpy() for read in reads)
        found[name] = tuple(in_memory(tensor, [next(data) for _ in tensor.parts], memory) for tensor in tensors)
    return found


def _lay_out(parts: Sequence[Extent]) -> tuple[list[TensorRead], Bytes]:
    """Return what reads ``parts`` into new memory, and that; large ones lie where storage can write, small ones by."""
    large = [part for part in parts if part.bytes >= SMALL_SPAN_BYTES]
    small = [part for part in parts if part.bytes < SMALL_SPAN_BYTES]
    sizes = [align_up(part.end) - align_down(part.begin) for part in large]
    sizes += [align_up(part.bytes, TENSOR_ALIGNMENT) for part in small]
    memory = private_memory(max(1, sum(sizes)))
    placed: dict[Extent, TensorRead] = {}
    begin = 0
    for part, size in zip((*large, *small), sizes, strict=True):
        placed[part] = _read(part, memory, begin, size, in_place=part.bytes >= SMALL_SPAN_BYTES)
        begin += size
    return [placed[part] for part in parts], np.frombuffer(memory, np.uint8)


def _read(part: Extent, memory: mmap.mmap, begin: int, size: int, *, in_place: bool) -> TensorRead:
    extent = part.as_bytes
    if not in_place:
        return TensorRead(extent, tensor_in(memory, begin, torch.uint8, extent.shape))
    skipped = part.begin - align_down(part.begin)
    target = tensor_in(memory, begin + skipped, torch.uint8, extent.shape)
    return TensorRead(extent, target, memoryview(memory)[begin : begin + size])
