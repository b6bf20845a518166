"""FP8 and FP4 weights unpack to the bits that transformers' own operation makes of the same codes and scales."""

from __future__ import annotations

import threading
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.checkpoint import open_checkpoint
from offstage.stages.checkpoints.codecs.scaled_codes import ScaledCodes, sample
from offstage.stages.checkpoints.device_codec import TILE
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.packed import BLOCK_BYTES, SCRATCH_BYTES, PackedTensor
from offstage.stages.checkpoints.quantised import logical_entries
from offstage.stages.checkpoints.readers import read_extent
from tests.operator_threads import in_threads
from tests.packed_references import unpacked_fp8

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def folded(
    folder: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, object] | None = None
) -> dict[str, object]:
    path = folder / "model.safetensors"
    save_file(tensors, path)
    return dict(logical_entries(open_checkpoint(path).entries, quantization or FP8))


def packed(folder: Path, codes: torch.Tensor, scales: torch.Tensor, **quantization: object) -> PackedTensor:
    tensors = {"a.weight": codes, "a.weight_scale_inv": scales}
    entries = folded(folder, tensors, FP8 | quantization)
    assert list(entries) == ["a.weight"]
    tensor = entries["a.weight"]
    assert isinstance(tensor, PackedTensor)
    return tensor


def codes_of(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    """Return every code there is, NaN too, again and again."""
    count = int(np.prod(shape))
    made = (torch.arange(count) * 37 + torch.arange(count) // 256) % 256
    return made.to(torch.uint8).view(dtype).view(shape)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether all numbers are alike to the bit, and what is no number is none in both."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    nan = left.isnan()
    bits = left.view(kinds[left.itemsize]), right.view(kinds[right.itemsize])
    return bool(torch.equal(nan, right.isnan()) and torch.equal(bits[0][~nan], bits[1][~nan]))


def scales_of(*shape: int) -> torch.Tensor:
    """Return scales of all sizes: subnormal, tiny, huge, zero, negative, infinite, no number."""
    torch.manual_seed(0)
    odd = torch.tensor([0.0, 1e-41, 1e-38, 3e38, 1.5e36, -0.7, float("inf"), float("nan"), 1.0, 2.0**-9])
    usual = torch.rand(int(np.prod(shape))) * 1e-3
    usual[: min(len(odd), len(usual))] = odd[: len(usual)]
    return usual.view(shape)


SHAPES = {
    "of blocks": ((256, 384), (2, 3)),
    "of one block": ((64, 96), (1, 1)),
    "of thin blocks": ((6, 64), (6, 2)),
    "of a stack": ((3, 256, 128), (3, 2, 1)),
    "of rows wider than a tile": ((3, 2 * TILE + 8), (3, 1)),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("case", SHAPES)
def test_weights_are_to_the_bit_those_that_transformers_dequantises(tmp_path: Path, case: str, dtype: str) -> None:
    shape, grid = SHAPES[case]
    codes, scales = codes_of(*shape), scales_of(*grid)
    tensor = replace(packed(tmp_path, codes, scales), dtype=dtype)
    made = read_extent(tensor)
    assert made.shape == shape
    assert same_bits(made, unpacked_fp8(codes, scales, getattr(torch, dtype)))
    assert tensor.rest_bytes == codes.nbytes + scales.nbytes


SCALES = {
    "float32": scales_of(2, 3),
    "bfloat16": scales_of(2, 3).to(torch.bfloat16),
    "float16": scales_of(2, 3).to(torch.float16),
    "ue8m0": torch.tensor([[0, 1, 127], [128, 254, 255]], dtype=torch.uint8).view(torch.float8_e8m0fnu),
    "ue8m0 as bytes": torch.tensor([[0, 1, 127], [128, 254, 255]], dtype=torch.uint8),
}


@pytest.mark.parametrize("kind", SCALES)
def test_scales_may_rest_in_any_dtype_that_transformers_takes(tmp_path: Path, kind: str) -> None:
    codes = codes_of(256, 384)
    made = read_extent(packed(tmp_path, codes, SCALES[kind]))
    assert same_bits(made, unpacked_fp8(codes, SCALES[kind]))


@pytest.mark.parametrize("scales", [torch.tensor(0.37), torch.tensor([0.37]), torch.tensor([[0.37]])])
def test_a_weight_may_have_one_scale(tmp_path: Path, scales: torch.Tensor) -> None:
    codes = codes_of(192, 80)
    made = read_extent(packed(tmp_path, codes, scales, weight_block_size=None))
    assert same_bits(made, unpacked_fp8(codes, scales))


def test_a_block_may_be_declared_larger_than_any_weight(tmp_path: Path) -> None:
    codes, scales = codes_of(64, 80), torch.tensor([[0.37]])
    made = read_extent(packed(tmp_path, codes, scales, weight_block_size=[10**30, 10**20]))
    assert same_bits(made, unpacked_fp8(codes, scales))


def test_each_expert_of_a_stack_may_have_one_scale(tmp_path: Path) -> None:
    codes, scales = codes_of(4, 32, 48), scales_of(4)
    made = read_extent(packed(tmp_path, codes, scales, weight_block_size=None))
    assert same_bits(made, unpacked_fp8(codes, scales))


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_fp4_has_two_values_to_a_byte(tmp_path: Path, dtype: torch.dtype) -> None:
    codes = codes_of(3, 64, 128, dtype=torch.int8)
    scales = torch.randint(120, 130, (3, 64, 8)).to(dtype)
    tensor = packed(tmp_path, codes, scales)
    assert (tensor.codec.name, tensor.shape) == ("fp4", (3, 64, 256))
    assert same_bits(read_extent(tensor), unpacked_fp8(codes, scales))


def test_blocks_that_are_cut_short_are_those_of_the_size_that_the_config_says(tmp_path: Path) -> None:
    codes, scales = codes_of(192, 320), scales_of(2, 3)
    padded = torch.zeros(256, 384).to(torch.float8_e4m3fn)
    padded.view(torch.uint8)[:192, :320] = codes.view(torch.uint8)
    whole = unpacked_fp8(padded, scales)
    assert same_bits(read_extent(packed(tmp_path, codes, scales)), whole[:192, :320])


def test_blocks_hold_all_rows_once_and_no_more_than_they_may(tmp_path: Path) -> None:
    tensor = packed(tmp_path, codes_of(2, 640, 8192), scales_of(2, 5, 64))
    blocks = tensor.codec.blocks(tensor)
    assert [row for block in blocks for row in range(block.begin, block.end)] == list(range(1280))
    assert max(block.end - block.begin for block in blocks) * 8192 * 2 <= BLOCK_BYTES
    assert sum(block.spans[0].bytes for block in blocks) == 2 * 640 * 8192


def test_experts_and_blocks_of_rows_are_read_alone(tmp_path: Path) -> None:
    stack, matrix = packed(tmp_path, codes_of(4, 128, 256), scales_of(4, 1, 2)), codes_of(300, 128)
    expert = stack.codec.rows(stack, 1, 3)
    assert expert is not None
    assert expert.shape == (2, 128, 256)
    assert same_bits(read_extent(expert), read_extent(stack)[1:3])
    tensor = packed(tmp_path, matrix, scales_of(3, 1))
    rows = tensor.codec.rows(tensor, 128, 300)
    assert rows is not None
    assert same_bits(read_extent(rows), read_extent(tensor)[128:])
    assert tensor.codec.rows(tensor, 1, 128) is None
    assert tensor.codec.rows(tensor, 0, 100) is None


def test_the_sample_is_one_block_that_unpacks() -> None:
    tensor, block, data = sample("fp8")
    target = np.zeros(tensor.bytes, np.uint8)
    tensor.codec.unpack(tensor, block, data, target)
    codes = torch.from_numpy(data[0]).view(torch.float8_e4m3fn).view(tensor.shape)
    scales = torch.from_numpy(data[1]).view(torch.float32).view(4, 32)
    made = torch.from_numpy(target).view(torch.bfloat16).view(tensor.shape)
    assert same_bits(made, unpacked_fp8(codes, scales))
    assert not made.isnan().any()


@pytest.mark.parametrize("name", ["fp8", "fp4", "int8", "int4"])
@pytest.mark.parametrize("block", [(1, 32), (1, 4096), (128, 128)])
def test_unpacking_takes_no_more_beside_than_it_may(name: Any, block: tuple[int, int]) -> None:
    tensor, whole, data = sample(name)
    rows, columns = tensor.shape
    codes, _ = tensor.parts
    grid = -(-rows // block[0]), columns // block[1]
    scales = Extent(codes.file, 0, "float32", grid)
    tensor = replace(tensor, codec=ScaledCodes(name, *block), parts=(codes, scales))
    target, given = np.zeros(tensor.bytes, np.uint8), [data[0], np.ones(grid, np.float32).view(np.uint8).ravel()]
    tracemalloc.start()
    tensor.codec.unpack(tensor, whole, given, target)
    traced = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    of_torch = TILE * (torch.float32.itemsize + torch.int16.itemsize)
    assert traced + of_torch < SCRATCH_BYTES


def test_a_thread_that_unpacks_starts_no_others() -> None:
    tensor, block, data = sample("fp8")
    before: set[str] = set()
    after: set[str] = set()

    def unpack() -> None:
        before.update(path.name for path in Path("/proc/self/task").iterdir())
        tensor.codec.unpack(tensor, block, data, np.zeros(tensor.bytes, np.uint8))
        after.update(path.name for path in Path("/proc/self/task").iterdir())

    with in_threads(4):
        thread = threading.Thread(target=unpack)
        thread.start()
        thread.join()
        unpack()
        assert torch.get_num_threads() == 4
    assert after <= before


CODES, SCALE = codes_of(256, 256), torch.ones(2, 2)
FAULTS = {
    "no scale": ({"a.weight": CODES}, "a.weight' is float8_e4m3fn without a scale 'a.weight_scale_inv'"),
    "no weight": ({"a.weight_scale_inv": SCALE}, "a.weight_scale_inv' is a scale without a weight"),
    "another shape": ({"a.weight": CODES, "a.weight_scale_inv": torch.ones(3, 2)}, r"shape \[3, 2\] doesn't fit"),
    "another rank": ({"a.weight": CODES, "a.weight_scale_inv": torch.ones(4)}, r"shape \[4\] doesn't fit"),
    "none at all": ({"a.weight": CODES, "a.weight_scale_inv": torch.ones(0, 2)}, r"shape \[0, 2\] doesn't fit"),
    "another dtype": (
        {"a.weight": CODES, "a.weight_scale_inv": SCALE.long()}, "a.weight_scale_inv' is int64; scales are",
    ),
    "a weight that is plain": (
        {"a.weight": torch.ones(256, 256), "a.weight_scale_inv": SCALE}, "a scale of 'a.weight', which is float32",
    ),
    "a vector": ({"a.weight": codes_of(256), "a.weight_scale_inv": torch.ones(2)}, "doesn't fit"),
    "another FP8": ({"a.weight": CODES.view(torch.float8_e5m2)}, "is float8_e5m2; of FP8, float8_e4m3fn alone"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_belong_together_is_refused_by_name(tmp_path: Path, fault: str) -> None:
    tensors, words = FAULTS[fault]
    with pytest.raises(CheckpointError, match=words) as error:
        folded(tmp_path, tensors)
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("size", [[128], [0, 128], "128x128", [128.0, 128]])
def test_a_block_size_that_is_none_is_refused(tmp_path: Path, size: object) -> None:
    with pytest.raises(CheckpointError, match="weight_block_size"):
        folded(tmp_path, {"a.weight": CODES, "a.weight_scale_inv": SCALE}, FP8 | {"weight_block_size": size})


@pytest.mark.parametrize("name", ["a.scale", "a.qscale_weight"])
def test_scales_have_the_names_that_transformers_renames(tmp_path: Path, name: str) -> None:
    entries = folded(tmp_path, {"a.weight": CODES, name: SCALE})
    assert list(entries) == ["a.weight"]


def test_scales_of_activations_and_what_is_plain_are_left_aside(tmp_path: Path) -> None:
    tensors = {
        "a.weight": CODES, "a.weight_scale_inv": SCALE, "a.activation_scale": torch.tensor(2.0),
        "norm.weight": torch.ones(8), "norm.scale": torch.ones(8),
    }  # fmt: skip
    assert set(folded(tmp_path, tensors)) == {"a.weight", "norm.weight", "norm.scale"}


def test_a_checkpoint_that_is_not_quantised_keeps_its_entries(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    entries = open_checkpoint(tmp_path / "model.safetensors").entries
    assert logical_entries(entries, None) is entries
