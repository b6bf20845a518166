"""Lossless packing of floats by zstandard: the bytes of equal weight together, each plane in frames of its own.

The high byte of a float has its sign and most of its exponent, and the exponents of weights lie close together: as a
plane they have under three bits a byte, which entropy coding alone gets. The search for repeated strings finds none, so
the parameters leave it next to nothing to do. The low bytes are noise, and zstandard stores them as they are; so every
plane is a frame with a checksum, and one of low bytes that are all zero shrinks too.

A tile is a stretch of elements that has one frame for each plane. No tile crosses the border of a run: the rows of a
mixture's experts are runs, so that an expert is read alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from offstage.pipeline.cache.sealed_files import move_aside
from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.codecs.loops import loops
from offstage.stages.checkpoints.extents import Extent, are_counts
from offstage.stages.checkpoints.packed import BLOCK_BYTES, PackedBlock, PackedTensor
from offstage.stages.checkpoints.shard_files import ShardFile

if TYPE_CHECKING:
    import zstandard  # where it is used: a run that packs nothing needs none of it

    from offstage.stages.machine.aligned_memory import Bytes  # without torch, which planning doesn't need

NAME = "zstd"
NAMES = (NAME,)
"""What rates of such copies are known by."""
TILE_ELEMENTS = 2**18
"""A tile's planes and what comes of them stay in a core's cache together."""
_MOST_BYTES = TILE_ELEMENTS + 2**12
"""What a frame of a tile takes at most: noise as it is, and what zstandard says of it."""

_DESCRIPTOR = 4
"""Where a frame says what it is, in one byte."""
_FLAGS, _OURS = 0b0011_1111, 0b0010_0100
"""What that byte says beside how large a number the size is; and what ours say: one segment, with a checksum."""
_WORDS: dict[str, np.dtype[np.unsignedinteger[Any]]] = {
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.uint16),
    "float32": np.dtype(np.uint32),
}
"""The unsigned numbers of each float's size."""
_LEAST_BYTES = 2**14
"""What is smaller is read in a page or two, packed or not."""


@dataclass(frozen=True, slots=True)
class PlaneCodec:
    """The planes of a tensor of ``dtype``, in tiles that begin anew with each ``run`` elements.

    ``tiles`` has the bytes at rest of each tile's planes, the lowest byte's first. All lie one after the other.
    """

    dtype: str
    run: int
    tiles: tuple[tuple[int, ...], ...]

    @property
    def name(self) -> str:
        """What its rate is known by."""
        return NAME

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtype that was packed."""
        return (self.dtype,)

    @property
    def rest_bytes(self) -> int:
        """What all tiles take at rest."""
        return sum(map(sum, self.tiles))

    def blocks(self, tensor: PackedTensor) -> tuple[PackedBlock, ...]:
        """Return neighbouring tiles together, and count blocks by tiles."""
        offsets = list(accumulate(map(sum, self.tiles), initial=tensor.begin))
        step = max(1, BLOCK_BYTES // (min(TILE_ELEMENTS, self.run) * _WORDS[self.dtype].itemsize))
        borders = [*range(0, len(self.tiles), step), len(self.tiles)]
        return tuple(
            PackedBlock((_bytes_of(tensor.file, offsets[begin], offsets[end]),), begin, end)
            for begin, end in pairwise(borders)
        )

    def unpack(self, tensor: PackedTensor, block: PackedBlock, data: Sequence[Bytes], target: Bytes) -> None:
        """Write the tiles of ``block`` to their places; the planes of a tile are all that is held beside.

        A file that is damaged is set aside: it is the offload store's, which only looks at a sample when it is opened.
        """
        import zstandard

        (packed,) = data
        decompressor, words = zstandard.ZstdDecompressor(), target.view(_WORDS[self.dtype])
        at = 0
        for index in range(block.begin, block.end):
            begin, end = _place(index, self.run)
            try:
                at = _unpack_tile(decompressor, packed, at, self.tiles[index], words[begin:end])
            except zstandard.ZstdError as error:
                path = tensor.file.path
                with suppress(OSError):
                    move_aside(path, "is damaged")
                raise CheckpointError(
                    f"{path}: damaged at byte {block.spans[0].begin + at} or soon after ({error}); run again: the "
                    "offload store makes it anew"
                ) from error

    def loop(self, tensor: PackedTensor, block: PackedBlock, data: Sequence[Bytes], target: Bytes) -> None:
        """Return nothing: zstandard unpacks."""

    def rows(self, tensor: PackedTensor, begin: int, end: int) -> PackedTensor | None:
        """Return rows ``begin`` to ``end``; null where a run has several of them."""
        width = math.prod(tensor.shape[1:])
        if not width or width % self.run:
            return None
        first, last = (row * width // self.run * _tiles_a_run(self.run) for row in (begin, end))
        part = replace(self, tiles=self.tiles[first:last])
        return part.located(
            tensor.file, tensor.begin + sum(map(sum, self.tiles[:first])), (end - begin, *tensor.shape[1:])
        )

    def located(self, file: ShardFile, begin: int, shape: tuple[int, ...]) -> PackedTensor:
        """Return the tensor of ``shape`` that lies in ``file`` from ``begin`` on."""
        return PackedTensor(self, (_bytes_of(file, begin, begin + self.rest_bytes),), self.dtype, shape)


def can_pack(dtype: str, size: int) -> bool:
    """Return whether a tensor of ``dtype`` and so many bytes may be packed."""
    return dtype in _WORDS and size >= _LEAST_BYTES


def pack_tile(data: Bytes, dtype: str, compressor: zstandard.ZstdCompressor) -> list[bytes]:
    """Return the frames of one tile, ``data`` being the bytes of its elements of ``dtype``: the lowest byte's first."""
    words = data.view(_WORDS[dtype])  # shifted: four times as fast as bytes in strides
    planes = ((words >> 8 * plane).astype(np.uint8) for plane in range(words.itemsize))
    return [compressor.compress(plane.data) for plane in planes]


def new_compressor() -> zstandard.ZstdCompressor:
    """Return what packs tiles, in one thread at a time."""
    import zstandard

    fast = {"strategy": zstandard.STRATEGY_FAST, "min_match": 7, "hash_log": 6}
    frame_options = {"write_checksum": 1, "write_content_size": 1, "write_dict_id": 0}
    return zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters(**fast, **frame_options))


def tile_borders(elements: int, run: int) -> Iterator[tuple[int, int]]:
    """Yield the first element of each tile and the one after its last, of so many ``elements`` in runs."""
    for index in range(elements // run * _tiles_a_run(run) if elements else 0):
        yield _place(index, run)


def codec_of(dtype: str, elements: int, run: object, tiles: object) -> PlaneCodec | None:
    """Return the codec that an index tells of a tensor of so many ``elements``; null where there can be no such one."""
    if dtype not in _WORDS or type(run) is not int or run <= 0 or elements % run or not isinstance(tiles, list):
        return None
    planes, count = _WORDS[dtype].itemsize, elements // run * _tiles_a_run(run)
    if any(not are_counts(tile) or len(tile) != planes or max(tile) > _MOST_BYTES for tile in tiles):
        return None
    return PlaneCodec(dtype, run, tuple(map(tuple, tiles))) if len(tiles) == count else None


def sample(name: str = NAME) -> tuple[PackedTensor, PackedBlock, list[Bytes]]:
    """Return a made-up tensor of one block with that block and its data: weights as they are, of bfloat16."""
    weights = np.random.default_rng(0).standard_normal(BLOCK_BYTES // 2, np.float32) * np.float32(0.02)
    data = np.ascontiguousarray(weights.view(np.uint16)[1::2]).view(np.uint8)
    compressor = new_compressor()
    tiles = [
        pack_tile(data[2 * a : 2 * b], "bfloat16", compressor) for a, b in tile_borders(weights.size, weights.size)
    ]
    packed = np.frombuffer(b"".join(frame for tile in tiles for frame in tile), np.uint8)
    codec = PlaneCodec("bfloat16", weights.size, tuple(tuple(map(len, tile)) for tile in tiles))
    tensor = codec.located(ShardFile("sample", Path("sample"), packed.size, None, ""), 0, (weights.size,))
    return tensor, codec.blocks(tensor)[0], [packed]


def _unpack_tile(
    decompressor: zstandard.ZstdDecompressor, packed: Bytes, at: int, lengths: Sequence[int], words: npt.NDArray[Any]
) -> int:
    """Merge the planes that lie in ``packed`` from ``at`` on into ``words``; return where they end.

    The highest comes first. Numbers of the float's size, shifted, are three times as fast as bytes in strides.
    """
    end = stop = at + sum(lengths)
    compiled = loops()
    if compiled is not None and len(lengths) == 2:
        middle = at + lengths[0]
        high = _unpack_plane(decompressor, packed[middle:end], words.size)
        compiled.merge_planes(_unpack_plane(decompressor, packed[at:middle], words.size), high, words)
        return end
    for length in reversed(lengths):
        plane = _unpack_plane(decompressor, packed[stop - length : stop], words.size)
        if stop == end:
            words[:] = plane
        else:
            np.left_shift(words, 8, out=words)
            np.bitwise_or(words, plane, out=words)
        stop -= length
    return end


def _unpack_plane(decompressor: zstandard.ZstdDecompressor, frame: Bytes, size: int) -> Bytes:
    """Return the ``size`` bytes of a frame. What it says of itself is checked before room is made for it."""
    import zstandard

    parameters = zstandard.get_frame_parameters(frame.data)
    if parameters.content_size != size or frame[_DESCRIPTOR] & _FLAGS != _OURS:
        raise zstandard.ZstdError(f"its frame tells of {parameters.content_size} bytes, and {size} belong there")
    return np.frombuffer(decompressor.decompress(frame.data, allow_extra_data=False), np.uint8)


def _place(index: int, run: int) -> tuple[int, int]:
    """Return the first element of the tile ``index`` and the one after its last."""
    number, tile = divmod(index, _tiles_a_run(run))
    begin = number * run + tile * TILE_ELEMENTS
    return begin, min(begin + TILE_ELEMENTS, (number + 1) * run)


def _tiles_a_run(run: int) -> int:
    return -(-run // TILE_ELEMENTS)


def _bytes_of(file: ShardFile, begin: int, end: int) -> Extent:
    return Extent(file, begin, "uint8", (end - begin,))
