"""Floats packed by planes: what is unpacked is bit for bit what was packed, or it is said that it can't be."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.codecs import planes
from offstage.stages.checkpoints.codecs.planes import PlaneCodec, codec_of, new_compressor, pack_tile, tile_borders
from offstage.stages.checkpoints.dtypes import dtype_name
from offstage.stages.checkpoints.packed import BLOCK_BYTES, PackedTensor, rest_bytes
from offstage.stages.checkpoints.readers import read_extent
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.machine.aligned_memory import byte_view

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def packed_at(path: Path, tensor: torch.Tensor, *, run: int | None = None) -> PackedTensor:
    data, run = np.frombuffer(byte_view(tensor), np.uint8), run or max(1, tensor.numel())
    size, compressor = tensor.itemsize, new_compressor()
    tiles = [
        pack_tile(data[begin * size : end * size], dtype_name(tensor.dtype), compressor)
        for begin, end in tile_borders(tensor.numel(), run)
    ]
    path.write_bytes(b"head" + b"".join(frame for tile in tiles for frame in tile))
    codec = PlaneCodec(dtype_name(tensor.dtype), run, tuple(tuple(map(len, tile)) for tile in tiles))
    return codec.located(ShardFile(path.name, path, path.stat().st_size, None, ""), 4, tuple(tensor.shape))


def bits_of(tensor: torch.Tensor) -> bytes:
    return bytes(byte_view(tensor.contiguous()))


def random_tensors(count: int) -> list[torch.Tensor]:
    """Weights, random bits, and values that are easily lost, of all dtypes, sizes and shapes."""
    torch.manual_seed(0)
    draw = random.Random(0)
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -1e-45, 6e-8, 1e38, 1.0]
    made = []
    for number in range(count):
        dtype = DTYPES[number % 3]
        shape = [draw.choice([1, 2, 3, 7, 64, 129]) for _ in range(draw.randrange(4))]
        kind = draw.choice(["weights", "bits", "special", "constant", "zeros", "one bit"])
        if kind == "bits":  # all payloads of NaN, and subnormals
            words = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
            made.append(words.view(dtype).reshape(shape))
        elif kind == "special":
            made.append(torch.tensor(special)[torch.randint(0, len(special), shape)].to(dtype))
        else:
            scale = {"weights": 0.02, "constant": 0.0, "zeros": 0.0, "one bit": 0.0}[kind]
            tensor = (torch.randn(shape) * scale + (0.1 if kind == "constant" else 0.0)).to(dtype)
            if kind == "one bit" and tensor.numel():
                tensor.view(-1)[draw.randrange(tensor.numel())] = 2.0**-14
            made.append(tensor)
    return made


def test_two_hundred_random_tensors_come_back_bit_for_bit(tmp_path: Path) -> None:
    for number, tensor in enumerate(random_tensors(200)):
        back = read_extent(packed_at(tmp_path / f"{number}.packed", tensor))
        assert (back.dtype, back.shape, bits_of(back)) == (tensor.dtype, tensor.shape, bits_of(tensor))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (1,), (planes.TILE_ELEMENTS + 1,), (3, 5, planes.TILE_ELEMENTS - 7)])
def test_empty_and_tiny_tensors_and_those_of_several_tiles_come_back(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path
) -> None:
    tensor = torch.randn(shape).to(dtype)
    packed = packed_at(tmp_path / "weight.packed", tensor)
    assert bits_of(read_extent(packed)) == bits_of(tensor)
    blocks = packed.codec.blocks(packed)
    assert sum(block.bytes for block in blocks) == rest_bytes(packed)
    assert all((block.end - block.begin) * planes.TILE_ELEMENTS * dtype.itemsize <= BLOCK_BYTES for block in blocks)


def test_bfloat16_weights_rest_in_two_thirds(tmp_path: Path) -> None:
    packed = packed_at(tmp_path / "weight.packed", torch.randn(2**20).bfloat16())
    assert rest_bytes(packed) / packed.bytes == pytest.approx(0.67, abs=0.01)


def test_floats_that_are_bfloat16_widened_rest_in_a_third(tmp_path: Path) -> None:
    packed = packed_at(tmp_path / "weight.packed", torch.randn(2**19).bfloat16().float())
    assert rest_bytes(packed) / packed.bytes == pytest.approx(0.335, abs=0.01)


@pytest.mark.parametrize("width", [12, planes.TILE_ELEMENTS + 5])
def test_each_row_can_be_read_alone_where_no_tile_has_two(width: int, tmp_path: Path) -> None:
    tensor = torch.randn(4, 2, width).bfloat16()
    packed = packed_at(tmp_path / "experts.packed", tensor, run=2 * width)
    for begin, end in ((0, 1), (3, 4), (1, 3), (0, 4)):
        row = packed.codec.rows(packed, begin, end)
        assert row is not None
        assert bits_of(read_extent(row)) == bits_of(tensor[begin:end])
        assert row.parts[0].end <= packed.parts[0].end
    whole = packed_at(tmp_path / "whole.packed", tensor)
    assert whole.codec.rows(whole, 0, 1) is None


def test_the_first_dimension_of_a_row_can_be_cut_where_runs_are_its_parts(tmp_path: Path) -> None:
    tensor = torch.randn(6, 8).half()
    packed = packed_at(tmp_path / "weight.packed", tensor, run=8)
    row = packed.codec.rows(packed, 2, 5)
    assert row is not None
    assert row.codec.rows(row, 1, 2) == packed.codec.rows(packed, 3, 4)


def test_a_flipped_bit_anywhere_is_found_and_said_or_changes_nothing(tmp_path: Path) -> None:
    """A frame has a few bits, between a stream's last one and its byte's end, that nobody reads."""
    tensor = torch.randn(600).bfloat16()
    path = tmp_path / "weight.packed"
    packed = packed_at(path, tensor)
    whole, passed = path.read_bytes(), 0
    for place in range(4, len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :])
        unpacked, message = None, ""
        try:
            unpacked = read_extent(packed)
        except CheckpointError as error:
            message = str(error)
        if unpacked is not None:
            assert torch.equal(unpacked, tensor)
            passed += 1
        else:
            assert "weight.packed: damaged at byte" in message
            assert not path.exists()
    assert passed < len(whole) / 100


def test_a_frame_that_tells_of_more_than_belongs_there_gets_no_room(tmp_path: Path) -> None:
    path = tmp_path / "weight.packed"
    packed = packed_at(path, torch.zeros(600).bfloat16())
    bomb = new_compressor().compress(bytes(2**26))
    path.write_bytes(b"head" + bomb)
    codec = PlaneCodec("bfloat16", 600, ((4, len(bomb)),))
    with pytest.raises(CheckpointError, match="tells of 67108864 bytes, and 600 belong there"):
        read_extent(codec.located(replace(packed.file, size=len(bomb) + 4), 0, (600,)))


@pytest.mark.parametrize(
    ("dtype", "run", "tiles"),
    [
        ("int8", 8, [[5, 5]]),
        ("bfloat16", 0, [[5, 5]]),
        ("bfloat16", 3, [[5, 5]]),
        ("bfloat16", 8.0, [[5, 5]]),
        ("bfloat16", 8, [[5, 5], [5, 5]]),
        ("bfloat16", 8, [[5]]),
        ("bfloat16", 8, [[-5, 5]]),
        ("bfloat16", 8, [["5", 5]]),
        ("bfloat16", 8, [[2**40, 5]]),
        ("bfloat16", 8, [5]),
        ("bfloat16", 8, None),
    ],
)
def test_an_index_that_tells_of_no_codec_there_can_be_isnt_believed(dtype: str, run: object, tiles: object) -> None:
    assert codec_of("bfloat16", 8, 8, [[5, 5]]) == PlaneCodec("bfloat16", 8, ((5, 5),))
    assert codec_of(dtype, 8, run, tiles) is None


def test_the_sample_is_a_block_that_can_be_unpacked_again_and_again() -> None:
    tensor, block, data = planes.sample()
    target = np.zeros(tensor.bytes, np.uint8)
    for _ in range(2):
        tensor.codec.unpack(tensor, block, data, target)
    assert (block.begin, len(tensor.codec.blocks(tensor))) == (0, 1)
    assert target.any()
    assert tensor.bytes == BLOCK_BYTES
