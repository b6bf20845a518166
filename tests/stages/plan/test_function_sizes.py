from __future__ import annotations

from enum import Enum

import pytest
import torch
from torch import nn

from offstage.stages.plan import (
    calculate_maximum_sizes,
    compute_module_sizes,
    compute_module_total_buffer_size,
    convert_file_size_to_int,
    dtype_byte_size,
    get_max_layer_size,
)
from tests.stages.plan.test_functions import Tied


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 16)
        self.feed_forward = nn.Module()
        sizes = [(16, 64), (64, 64), (64, 64), (64, 16)]
        self.feed_forward.layers = nn.ModuleList(nn.Linear(*size) for size in sizes)
        self.head = nn.Linear(16, 3)


def test_sizes_are_those_of_the_smaller_dtype_and_special_ones_win() -> None:
    sizes = compute_module_sizes(
        Classifier().half(), dtype=torch.float32, special_dtypes={"feed_forward.layers.0.weight": torch.float32}
    )
    expected = {
        "": 26246, "embed": 3200, "feed_forward": 22944, "feed_forward.layers.0": 4224,
        "feed_forward.layers.0.weight": 4096, "feed_forward.layers.0.bias": 128, "feed_forward.layers.1": 8320,
        "feed_forward.layers.3": 2080, "head": 102,
    }  # fmt: skip
    assert {name: sizes[name] for name in expected} == expected


def test_integers_keep_their_size_and_a_bool_is_a_byte() -> None:
    model = nn.BatchNorm1d(4)
    model.register_buffer("mask", torch.ones(5, dtype=torch.bool))
    sizes = compute_module_sizes(model, dtype="float16")
    assert (sizes["num_batches_tracked"], sizes["mask"], sizes["weight"]) == (8, 5, 8)
    assert compute_module_sizes(model, buffers_only=True)[""] == 8 + 5 + 2 * 16


def test_a_tied_tensor_counts_once_in_the_whole_and_in_full_where_it_lies() -> None:
    sizes = compute_module_sizes(Tied())
    assert (sizes[""], sizes["embed"], sizes["head"]) == (160 + 32, 160, 160)


def test_the_largest_layer_is_what_is_not_split() -> None:
    model = Classifier()
    sizes = compute_module_sizes(model)
    modules = list(model.named_children())
    assert get_max_layer_size(modules, sizes, []) == (16640, ["feed_forward.layers.1", "feed_forward.layers.2"])
    assert get_max_layer_size(modules, sizes, ["ModuleList"]) == (41792, ["feed_forward.layers"])


def test_the_whole_and_its_largest_layer_are_told() -> None:
    assert calculate_maximum_sizes(Classifier()) == (48396, (16640, ["feed_forward.layers.1", "feed_forward.layers.2"]))
    model = Classifier()
    model._no_split_modules = ["ModuleList"]
    assert calculate_maximum_sizes(model)[1] == (41792, ["feed_forward.layers"])


def test_the_bytes_of_all_buffers_are_told() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(3))
    assert compute_module_total_buffer_size(model) == 2 * 3 * 4 + 8
    assert compute_module_total_buffer_size(model, dtype=torch.float16) == 2 * 3 * 2 + 8
    assert compute_module_total_buffer_size(nn.Linear(2, 2)) == 0


@pytest.mark.parametrize(
    ("size", "count"),
    [("0MB", 0), ("100kB", 10**5), ("1.5GB", 1_500_000_000), ("2gib", 2**31), (7, 7), ("8Gb", 10**9), ("8kb", 1000)],
)
def test_a_files_size_is_read_bits_by_a_small_b(size: int | str, count: int) -> None:
    assert convert_file_size_to_int(size) == count


@pytest.mark.parametrize("size", ["5MBB", "5k0MB", "-1GB", -1])
def test_what_is_no_files_size_is_refused(size: int | str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        convert_file_size_to_int(size)


def test_a_dtype_has_its_bytes() -> None:
    packed = Enum("packed", {"INT4": "int4"})
    dtypes = [torch.bfloat16, "float64", "torch.int8", torch.float8_e8m0fnu, torch.complex64, packed.INT4, torch.bool]
    assert [dtype_byte_size(dtype) for dtype in dtypes] == [2, 8, 1, 1, 8, 0.5, 0.125]
    with pytest.raises(ValueError, match="'float31' is not a dtype"):
        dtype_byte_size("float31")
