import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offstage.stages.checkpoints.codecs.ggml_formats import FORMATS
from offstage.stages.checkpoints.codecs.gguf import DTYPES, Arrangement, GgufCodec, sample
from offstage.stages.checkpoints.device_codec import TILE, can_unpack, device_bytes
from offstage.stages.checkpoints.dtypes import torch_dtype
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.packed import BLOCK_BYTES, SCRATCH_BYTES, PackedTensor
from offstage.stages.checkpoints.readers import read_extent
from offstage.stages.checkpoints.shard_files import ShardFile
from tests.stages.checkpoints.ggufs import dequantized, random_blocks

pytest.importorskip("gguf")


def packed_tensor(
    path: Path, parts: list[tuple[str, Any]], shape: tuple[int, ...], arrangement: Arrangement | None = None
) -> PackedTensor:
    """Return a tensor of ``shape`` whose ``parts`` (kind, rows of blocks) lie in the file ``path``."""
    path.write_bytes(b"head" + b"".join(rows.tobytes() for _, rows in parts))
    file = ShardFile(path.name, path, path.stat().st_size, None, "")
    begin, extents = 4, []
    for _, rows in parts:
        extents.append(Extent(file, begin, "uint8", rows.shape))
        begin += rows.nbytes
    codec = GgufCodec(tuple(kind for kind, _ in parts), arrangement or Arrangement())
    return PackedTensor(codec, tuple(extents), "float32", shape)


def assert_same(tensor: PackedTensor, truth: Any) -> None:
    """Hold ``tensor`` in every dtype against ``truth``, float32, bit for bit."""
    for dtype in DTYPES:
        got, wanted = read_extent(replace(tensor, dtype=dtype)), torch.tensor(truth).to(torch_dtype(dtype))
        assert got.shape == wanted.shape
        assert torch.equal(got.view(torch.uint8), wanted.contiguous().view(torch.uint8)), dtype


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_comes_out_as_the_package_of_the_format_has_it(tmp_path: Path, kind: str) -> None:
    rows = random_blocks(kind, 48, 768)
    assert_same(packed_tensor(tmp_path / "f", [(kind, rows)], (48, 768)), dequantized(kind, rows))


@pytest.mark.parametrize("kind", [kind for kind, form in FORMATS.items() if form.elements > 1])
def test_any_bytes_at_all_come_out_as_that_package_has_them(tmp_path: Path, kind: str) -> None:
    size = 60, 3 * 256 // FORMATS[kind].elements * FORMATS[kind].bytes
    rows = np.random.default_rng(1).integers(256, size=size, dtype=np.uint8)
    got = read_extent(packed_tensor(tmp_path / "f", [(kind, rows)], (60, 768)))
    with np.errstate(all="ignore"):
        wanted = torch.from_numpy(dequantized(kind, rows))
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.nan_to_num().view(torch.int32), wanted.nan_to_num().view(torch.int32))


@pytest.mark.parametrize("kind", FORMATS)
def test_unpacking_takes_no_more_beside_than_it_may(kind: str) -> None:
    tensor, block, data = sample(kind)
    target = np.zeros(tensor.bytes, np.uint8)
    tensor.codec.unpack(tensor, block, data, target)  # imports, and makes the package's tables
    tracemalloc.start()
    tensor.codec.unpack(tensor, block, data, target)
    traced = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert traced + TILE * (torch.float32.itemsize + torch.int16.itemsize) < SCRATCH_BYTES


def test_formats_that_torch_has_no_operators_for_are_left_to_the_host() -> None:
    assert can_unpack(sample("q4_k")[0])
    assert not can_unpack(sample("iq2_xs")[0])
    assert device_bytes([sample("iq2_xs")[0]]) == 0


@pytest.mark.parametrize("kind", ["q8_0", "q4_k", "f32", "q2_k"])
def test_rows_longer_than_a_tile_and_tensors_of_several_blocks_are_whole(tmp_path: Path, kind: str) -> None:
    rows = random_blocks(kind, 9, 2**18)
    tensor = packed_tensor(tmp_path / "f", [(kind, rows)], (9, 2**18))
    assert TILE < 2**18
    assert len(tensor.codec.blocks(tensor)) == -(-9 * 2**20 // BLOCK_BYTES)
    assert_same(tensor, dequantized(kind, rows))


def test_rows_that_were_put_in_the_order_of_llama_cpp_are_put_back(tmp_path: Path) -> None:
    heads, half, rows = 4, 8, random_blocks("q4_0", 64, 96)
    truth = dequantized("q4_0", rows).reshape(heads, half, 2, 96).swapaxes(1, 2).reshape(64, 96)
    assert_same(packed_tensor(tmp_path / "f", [("q4_0", rows)], (64, 96), Arrangement((heads, half, 2, 1))), truth)


def test_a_matrix_that_was_transposed_is_put_back(tmp_path: Path) -> None:
    rows = random_blocks("q8_0", 40, 64)
    tensor = packed_tensor(tmp_path / "f", [("q8_0", rows)], (64, 40), Arrangement(transposed=True))
    assert_same(tensor, np.ascontiguousarray(dequantized("q8_0", rows).T))


def test_what_was_added_to_a_norm_is_taken_off_before_it_is_rounded(tmp_path: Path) -> None:
    rows = np.linspace(0.98, 1.02, 64, dtype=np.float32).reshape(1, -1)
    tensor = packed_tensor(tmp_path / "f", [("f32", rows.view(np.uint8))], (64,), Arrangement(less=1.0))
    assert_same(tensor, (rows - 1).reshape(-1))


def test_the_halves_of_a_stack_come_together_expert_by_expert(tmp_path: Path) -> None:
    gate, up = random_blocks("q4_k", 3 * 40, 256), random_blocks("q6_k", 3 * 40, 256, seed=1)
    tensor = packed_tensor(tmp_path / "f", [("q4_k", gate), ("q6_k", up)], (3, 80, 256))
    truth = np.concatenate(
        [dequantized("q4_k", gate).reshape(3, 40, 256), dequantized("q6_k", up).reshape(3, 40, 256)], axis=1
    )
    assert_same(tensor, truth)
    alone = tensor.codec.rows(tensor, 1, 3)
    assert alone is not None
    assert alone.rest_bytes == tensor.rest_bytes * 2 // 3
    assert_same(alone, truth[1:3])


def test_rows_alone_are_those_of_the_tensor_unless_the_file_has_them_in_another_order(tmp_path: Path) -> None:
    rows = random_blocks("q5_k", 16, 256)
    tensor = packed_tensor(tmp_path / "f", [("q5_k", rows)], (16, 256))
    alone = tensor.codec.rows(tensor, 5, 9)
    assert alone is not None
    assert_same(alone, dequantized("q5_k", rows)[5:9])
    for other in (Arrangement((2, 4, 2, 1)), Arrangement(transposed=True)):
        assert GgufCodec(("q5_k",), other).rows(tensor, 5, 9) is None


def test_values_that_are_no_numbers_stay_none(tmp_path: Path) -> None:
    values = np.array([[np.nan, np.inf, -np.inf, 3e38, 1e-40, -0.0, 1.0, -2.5]], np.float32)
    values.view(np.uint32)[0, 0] = 0x7FFFFFFF
    tensor = packed_tensor(tmp_path / "f", [("f32", values.view(np.uint8))], (8,))
    for dtype in DTYPES:
        got = read_extent(replace(tensor, dtype=dtype))
        assert got[0].isnan()
        assert torch.equal(got[1:], torch.tensor(values[0, 1:]).to(got.dtype))


@pytest.mark.parametrize("kind", FORMATS)
def test_there_is_a_sample_of_every_format_to_be_timed(kind: str) -> None:
    tensor, block, data = sample(kind)
    assert tensor.bytes == BLOCK_BYTES
    target = np.full(tensor.bytes, 255, np.uint8)
    tensor.codec.unpack(tensor, block, data, target)
    assert target.min() < 255
