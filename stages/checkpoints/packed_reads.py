"""Reading packed tensors: a block at a time, and whole in the thread that asks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TypeVar

import numpy as np
import torch

from pipeline.environment import allowed_cores
from stages.checkpoints.direct_file import Chunk
from stages.checkpoints.dtypes import torch_dtype
from stages.checkpoints.extents import Extent
from stages.checkpoints.memory_file import MemoryFile
from stages.checkpoints.packed import PackedBlock, PackedTensor
from stages.checkpoints.shard_files import opened_shard, read_into
from stages.machine.aligned_memory import Bytes, align_down, align_up, byte_view, room_for

SMALL_SPAN_BYTES = 64 * 2**10
"""Smaller spans, such as scales, are read through the page cache: an aligned read brings more than is asked for."""

_UNPACKING = threading.BoundedSemaphore(len(allowed_cores()))

Buffer = TypeVar("Buffer")

ReadSmall = Callable[[Extent, memoryview], object]
"""Fills the memory with a span."""

ReadChunk = Callable[[Chunk, memoryview], object]
"""Reads a chunk directly into the aligned memory, ``chunk.length`` bytes."""


def room_at_rest(block: PackedBlock) -> int:
    """Return the aligned memory that ``block`` is read into, in bytes."""
    return sum(
        _chunk(span).length if span.bytes >= SMALL_SPAN_BYTES else align_up(span.bytes)
        for span in block.spans
        if not isinstance(span.file, MemoryFile)
    )


@contextmanager
def lent(buffers: SimpleQueue[Buffer]) -> Iterator[Buffer]:
    """Lend one of ``buffers``, once there is one."""
    buffer = buffers.get()
    try:
        yield buffer
    finally:
        buffers.put(buffer)


def bring_block(
    tensor: PackedTensor, block: PackedBlock, target: Bytes, *, buffer: Bytes, small: ReadSmall, direct: ReadChunk
) -> int:
    """Read ``block`` and unpack it to its place in ``target``, the bytes of all of ``tensor``.

    It is read into ``buffer``, which is aligned and has ``room_at_rest`` bytes at least. Returns how many bytes were
    read.
    """
    data, count = read_block(block, buffer, small=small, direct=direct)
    _unpack_block(tensor, block, data, target)
    return count


def read_block(block: PackedBlock, buffer: Bytes, *, small: ReadSmall, direct: ReadChunk) -> tuple[list[Bytes], int]:
    """Return the bytes of the spans of ``block``, and how many were read: what isn't in memory, into ``buffer``."""
    data: list[Bytes] = []
    begin, count = 0, 0
    for span in block.spans:
        if isinstance(span.file, MemoryFile):
            data.append(span.file.bytes_of(span))
            continue
        if span.bytes < SMALL_SPAN_BYTES:
            data.append(buffer[begin : begin + span.bytes])
            small(span, data[-1].data)
            begin, count = begin + align_up(span.bytes), count + span.bytes
            continue
        chunk = _chunk(span)
        direct(chunk, buffer[begin : begin + chunk.length].data)
        data.append(buffer[begin + chunk.skipped : begin + chunk.wanted])
        begin, count = begin + chunk.length, count + chunk.wanted
    return data, count


def _chunk(span: Extent) -> Chunk:
    return Chunk(span.file, align_down(span.begin), span.begin, span.end)


def _unpack_block(tensor: PackedTensor, block: PackedBlock, data: Sequence[Bytes], target: Bytes) -> None:
    """Unpack ``block`` to its place in ``target``, as many at a time as there are cores.

    More of them would wait for each other, and each for Python's lock between two of its operators.
    """
    with _UNPACKING:
        tensor.codec.unpack(tensor, block, data, target)


def read_packed(tensor: PackedTensor) -> torch.Tensor:
    """Return ``tensor`` as it is used, on the cpu, in new memory; read and unpacked block by block."""
    made = room_for(tensor.shape, torch_dtype(tensor.dtype)).tensor
    if made.numel():
        fill_packed(tensor, made)
    return made


def fill_packed(tensor: PackedTensor, target: torch.Tensor) -> None:
    """Read and unpack ``tensor`` into ``target``: contiguous, on the cpu, of its dtype and shape, not empty."""
    place = np.frombuffer(byte_view(target), np.uint8)
    for block in tensor.codec.blocks(tensor):
        _unpack_block(tensor, block, [_bytes_of(span) for span in block.spans], place)


def _bytes_of(span: Extent) -> Bytes:
    if isinstance(span.file, MemoryFile):
        return span.file.bytes_of(span)
    data = np.empty(span.bytes, np.uint8)
    read_span(span, data.data)
    return data


def read_span(span: Extent, target: memoryview) -> None:
    """Fill ``target`` with the bytes at ``span``, through the page cache, if its file is what it was."""
    with opened_shard(span.file) as descriptor:
        read_into(descriptor, target, offset=span.begin, path=span.file.path)
