"""Filling the offload store with what a load needs of it: made once, for all runs of a checkpoint and dtype.

That is what can't be served from the checkpoint as it is, and packed copies where those are asked for. Copies are
packed losslessly, block by block, on all cores: read past the page cache, or from memory where a tensor had to be made
first, packed and handed over in order. No more is held than a few blocks.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from itertools import accumulate, islice
from typing import TypeVar

import numpy as np
import torch

from offstage.pipeline.environment import allowed_cores
from offstage.stages.checkpoints.byte_bar import byte_bar
from offstage.stages.checkpoints.codecs.planes import TILE_ELEMENTS, new_compressor, pack_tile, tile_borders
from offstage.stages.checkpoints.direct_file import whole
from offstage.stages.checkpoints.dtypes import torch_dtype
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.open_files import OpenFiles
from offstage.stages.checkpoints.packed import BLOCK_BYTES
from offstage.stages.checkpoints.readers import read_extent
from offstage.stages.machine.aligned_memory import Bytes, byte_view, private_memory
from offstage.stages.machine.devices import Devices
from offstage.stages.shard_load.checkpoint_match import Load
from offstage.stages.shard_load.model_tensors import make_tensors
from offstage.stages.shard_load.offload_store import OffloadStore, StoredTensor, Wanted
from offstage.stages.shard_load.sources import Sources, TensorSource, located

LARGE_BYTES = 32 * 2**20
"""What is only cast, and as large as that, is cast piece by piece."""
PIECE_BYTES = 4 * 2**20
WORTH = 0.95
"""What is packed to no less than this share of itself isn't worth unpacking, and stays as it is."""
_AHEAD = 8
"""Blocks that are being packed, or wait to be written."""
_SAMPLE_ELEMENTS = 2**15
_SAMPLES = 3

Item = TypeVar("Item")
Made = TypeVar("Made")
ByteReader = Callable[[int, int], Bytes]
"""Returns the bytes of a tensor from one of them to another, in any thread."""


def fill_store(load: Load, sources: Sources, store: OffloadStore, *, full: bool = False) -> Sources:
    """Return ``sources`` with where the ``store`` has them, after adding what isn't there, or damaged.

    A copy that doesn't shrink is none: its tensor is brought as it would be otherwise, which may be from the store too.
    ``full`` compares every checksum of the store, not a sample.
    """
    with store.locked():
        while wanted := {name: _stored(load, source) for name, source in sources.items() if source.wants_store}:
            places = store.fill(wanted, partial(_add, load, store, sources), full=full)
            settled = {
                name: sources[name].turned_back if at is None else located(load, sources[name], (at,))
                for name, at in places.items()
            }
            sources = {**sources, **settled}
    return sources


def _stored(load: Load, source: TensorSource) -> StoredTensor:
    """Return ``source`` as the store has it; of a packed copy each expert can be read alone."""
    spec, elements = source.spec, math.prod(source.spec.shape)
    run = elements // spec.shape[0] if spec.name in load.expert_names else elements
    names = tuple(load.step_of(source.spec.name).source_names)
    return StoredTensor(spec.dtype, spec.shape, names, None if source.otherwise is None else run)


def _add(load: Load, store: OffloadStore, sources: Sources, absent: Wanted) -> None:
    """Put the tensors ``absent`` into the store: packed from where they lie, cast piece by piece, or made whole.

    Of a tensor that doesn't shrink enough it is noted instead.
    """
    packable = {
        name: [at for at in sources[name].at if isinstance(at, Extent) and at.bytes]
        for name in absent
        if sources[name].at
    }
    shares: dict[str, float] = {}
    for name, extents in packable.items():
        with opened(extents) as read:
            shares[name] = packed_share(absent[name], read)
        if shares[name] > WORTH:
            store.note_plain(name, absent[name])
    left = {name: tensor for name, tensor in absent.items() if shares.get(name, 0) <= WORTH}
    store.check_space(len(left), math.ceil(sum(tensor.bytes * shares.get(name, 1) for name, tensor in left.items())))
    with byte_bar("packing", sum(left[name].bytes for name in packable.keys() & left.keys())) as bar:
        for name in (name for name in packable if name in left):
            with opened(packable[name]) as read, closing(pack(left[name], read, bar.update)) as tiles:
                store.put_packed(name, left.pop(name), tiles)
    for name, extent in _cast_sources(load, left, sources).items():
        store.put(name, left.pop(name), _cast_pieces(load, sources[name], extent))
    for name, tensor in make_tensors(load, {name: sources[name] for name in left}, "offloading", devices=Devices()):
        _put_whole(store, name, left[name], tensor)
        del tensor  # or it would be held while the next one is made


def _put_whole(store: OffloadStore, name: str, tensor: StoredTensor, whole: torch.Tensor) -> None:
    if tensor.run is None:
        store.put(name, tensor, [byte_view(whole)])
    elif packed_share(tensor, bytes_of(whole)) > WORTH:
        store.note_plain(name, tensor)
    else:
        with closing(pack(tensor, bytes_of(whole))) as tiles:
            store.put_packed(name, tensor, tiles)


def _cast_sources(load: Load, wanted: Wanted, sources: Sources) -> dict[str, Extent]:
    """Return where those of the tensors ``wanted`` lie that are large and only cast.

    A run's budget may be less than one of its tensors, which then comes by blocks of rows: it mustn't be whole here.
    """
    extents = {}
    for name in (name for name, tensor in wanted.items() if tensor.run is None):
        step = load.step_of(name)
        extent = load.extent_of(step) if step.converter is None else None
        if isinstance(extent, Extent) and extent.bytes >= LARGE_BYTES:
            extents[name] = extent
    return extents


def _cast_pieces(load: Load, source: TensorSource, extent: Extent) -> Iterator[memoryview]:
    """Yield the bytes of a tensor, read from its ``extent`` and cast some rows at a time."""
    dtype, count = torch_dtype(source.spec.dtype), extent.shape[0]
    rows = max(1, PIECE_BYTES * count // extent.bytes)
    for begin in range(0, count, rows):
        piece = read_extent(extent.rows(begin, min(begin + rows, count)))
        yield byte_view(load.checked(source.spec.name, piece.to(dtype)))


def bytes_of(tensor: torch.Tensor) -> ByteReader:
    """Return what reads the bytes of a contiguous ``tensor`` on the cpu, without a copy."""
    data = np.frombuffer(byte_view(tensor), np.uint8)
    return lambda begin, end: data[begin:end]


@contextmanager
def opened(extents: Sequence[Extent]) -> Iterator[ByteReader]:
    """Yield what reads the bytes of ``extents``, one after the other; each of their files is opened once."""
    begins = list(accumulate((extent.bytes for extent in extents), initial=0))
    with closing(OpenFiles(dict.fromkeys(extent.file for extent in extents))) as files:

        def read(begin: int, end: int) -> Bytes:
            first, last = bisect_right(begins, begin) - 1, bisect_right(begins, end - 1)
            parts = [
                _read(files, extent, max(begin - at, 0), min(end - at, extent.bytes))
                for extent, at in zip(extents[first:last], begins[first:last], strict=True)
            ]
            return parts[0] if len(parts) == 1 else np.concatenate(parts)

        yield read


def _read(files: OpenFiles, extent: Extent, begin: int, end: int) -> Bytes:
    """Return the bytes ``begin`` to ``end`` of ``extent``, past the page cache."""
    chunk = whole(Extent(extent.file, extent.begin + begin, "uint8", (end - begin,)))
    memory = private_memory(chunk.length)
    files.read(chunk, memoryview(memory))
    return np.frombuffer(memory, np.uint8, end - begin, chunk.skipped)


def pack(
    tensor: StoredTensor, read: ByteReader, progress: Callable[[int], object] | None = None
) -> Generator[list[bytes]]:
    """Yield the frames of each tile, in order; ``progress`` is told of the bytes that they were.

    A thread for each core packs. None reads any more once the generator is closed.
    """
    elements, size = math.prod(tensor.shape), torch_dtype(tensor.dtype).itemsize
    run = tensor.run or elements
    borders = tile_borders(elements, run)
    step = max(1, BLOCK_BYTES // (min(TILE_ELEMENTS, run) * size))
    blocks = iter(lambda: tuple(islice(borders, step)), ())
    with closing(in_order(partial(_pack_block, tensor, read), blocks)) as packed:
        for block, tiles in packed:
            yield from tiles
            if progress:
                progress((block[-1][1] - block[0][0]) * size)


def in_order(
    work: Callable[[Item], Made], items: Iterator[Item], *, most: int = _AHEAD
) -> Generator[tuple[Item, Made]]:
    """Yield each of ``items`` and what ``work`` makes of it, in order: a thread for each core works, a few ahead.

    No more than ``most`` are under way, or wait, at a time. None begins any more once the generator is closed.
    """
    waiting: deque[tuple[Item, Future[Made]]] = deque()
    ahead = max(1, min(most, _AHEAD))
    pool = ThreadPoolExecutor(min(len(allowed_cores()), ahead), thread_name_prefix="packer")
    try:
        while True:
            for item in islice(items, ahead - len(waiting)):
                waiting.append((item, pool.submit(work, item)))
            if not waiting:
                return
            item, future = waiting.popleft()
            yield item, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def packed_share(tensor: StoredTensor, read: ByteReader) -> float:
    """Return the share of its bytes that ``tensor`` is packed to, by a few stretches of it."""
    elements = math.prod(tensor.shape)
    count = min(_SAMPLE_ELEMENTS, elements)
    begins = {(elements - count) * number // (_SAMPLES - 1) for number in range(_SAMPLES)}
    packed = [sum(map(len, tile)) for begin in begins for tile in _pack_block(tensor, read, ((begin, begin + count),))]
    return sum(packed) / (len(begins) * count * torch_dtype(tensor.dtype).itemsize)


def _pack_block(tensor: StoredTensor, read: ByteReader, borders: Sequence[tuple[int, int]]) -> list[list[bytes]]:
    """Return the frames of neighbouring tiles."""
    size, compressor = torch_dtype(tensor.dtype).itemsize, new_compressor()
    first = borders[0][0]
    data = read(first * size, borders[-1][1] * size)
    return [
        pack_tile(data[(begin - first) * size : (end - first) * size], tensor.dtype, compressor)
        for begin, end in borders
    ]
