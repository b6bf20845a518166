"""Packing tensors losslessly, block by block, on all cores: read, packed and handed over in order.

What is packed comes from the checkpoint's files, past the page cache, or from memory where it had to be made first. No
more of it is held than a few blocks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import accumulate, islice
from types import TracebackType
from typing import Protocol

import numpy as np
import torch

from offstage.pipeline.environment import allowed_cores
from offstage.stages.checkpoints.codecs.planes import TILE_ELEMENTS, new_compressor, pack_tile, tile_borders
from offstage.stages.checkpoints.direct_file import whole
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.open_files import OpenFiles
from offstage.stages.checkpoints.packed import BLOCK_BYTES
from offstage.stages.machine.aligned_memory import Bytes, byte_view, private_memory
from offstage.stages.units import DTYPE_BYTES

WORTH = 0.95
"""What is packed to no less than this share of itself isn't worth unpacking, and stays as it is."""
_AHEAD = 8
"""Blocks that are being packed, or wait to be written."""
_SAMPLE_ELEMENTS = 2**15
_SAMPLES = 3


class ByteSource(Protocol):
    """The bytes of a tensor that is to be packed."""

    def read(self, begin: int, end: int) -> Bytes:
        """Return the bytes from ``begin`` to ``end``, in any thread."""


class InMemory:
    """A tensor on the cpu, contiguous."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._data = np.frombuffer(byte_view(tensor), np.uint8) if tensor.numel() else np.empty(0, np.uint8)

    def read(self, begin: int, end: int) -> Bytes:
        """Return a view."""
        return self._data[begin:end]


class InFiles:
    """Extents, one after the other; each file is opened once."""

    def __init__(self, extents: Sequence[Extent]) -> None:
        self._extents = [extent for extent in extents if extent.bytes]
        self._begins = list(accumulate((extent.bytes for extent in self._extents), initial=0))
        self._files = OpenFiles(dict.fromkeys(extent.file for extent in self._extents))

    def read(self, begin: int, end: int) -> Bytes:
        """Read from as many of the extents as have some of it."""
        first, last = bisect_right(self._begins, begin) - 1, bisect_right(self._begins, end - 1)
        parts = [
            self._read(extent, max(begin - at, 0), min(end - at, extent.bytes))
            for extent, at in zip(self._extents[first:last], self._begins[first:last], strict=True)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _read(self, extent: Extent, begin: int, end: int) -> Bytes:
        chunk = whole(Extent(extent.file, extent.begin + begin, "uint8", (end - begin,)))
        memory = private_memory(chunk.length)
        self._files.read(chunk, memoryview(memory))
        return np.frombuffer(memory, np.uint8, end - begin, chunk.skipped)

    def close(self) -> None:
        """Close the files."""
        self._files.close()


@dataclass(frozen=True, slots=True)
class Unpacked:
    """A tensor to be packed: so many ``elements`` of ``dtype``, of which each ``run`` is to be read alone."""

    source: ByteSource
    dtype: str
    elements: int
    run: int

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        return int(DTYPE_BYTES[self.dtype])


class Packer:
    """Packs with a thread for each core; a context manager."""

    def __enter__(self) -> Packer:
        self._pool = ThreadPoolExecutor(min(len(allowed_cores()), _AHEAD), thread_name_prefix="packer")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)

    def pack(self, tensor: Unpacked, progress: Callable[[int], object] | None = None) -> Generator[list[bytes]]:
        """Yield the frames of each tile, in order; ``progress`` is told of the bytes that they were."""
        borders = tile_borders(tensor.elements, tensor.run)
        step = max(1, BLOCK_BYTES // (min(TILE_ELEMENTS, tensor.run) * tensor.itemsize))
        blocks = iter(lambda: tuple(islice(borders, step)), ())
        waiting: deque[tuple[int, Future[list[list[bytes]]]]] = deque()
        try:
            while True:
                for block in islice(blocks, _AHEAD - len(waiting)):
                    count = (block[-1][1] - block[0][0]) * tensor.itemsize
                    waiting.append((count, self._pool.submit(_pack_block, tensor, block)))
                if not waiting:
                    return
                count, packed = waiting.popleft()
                yield from packed.result()
                if progress:
                    progress(count)
        finally:
            wait([packed for _, packed in waiting if not packed.cancel()])  # then no thread reads what is closed


def packed_share(tensor: Unpacked) -> float:
    """Return the share of its bytes that ``tensor`` is packed to, by a few stretches of it."""
    count = min(_SAMPLE_ELEMENTS, tensor.elements)
    begins = {(tensor.elements - count) * number // (_SAMPLES - 1) for number in range(_SAMPLES)}
    packed = [sum(map(len, tile)) for begin in begins for tile in _pack_block(tensor, ((begin, begin + count),))]
    return sum(packed) / (len(begins) * count * tensor.itemsize)


def _pack_block(tensor: Unpacked, borders: Sequence[tuple[int, int]]) -> list[list[bytes]]:
    """Return the frames of neighbouring tiles."""
    size, compressor = tensor.itemsize, new_compressor()
    first = borders[0][0]
    data = tensor.source.read(first * size, borders[-1][1] * size)
    return [
        pack_tile(data[(begin - first) * size : (end - first) * size], tensor.dtype, compressor)
        for begin, end in borders
    ]
