from __future__ import annotations

import torch
from torch import nn

from offstage.stages.plan import (
    calculate_maximum_sizes,
    compute_module_sizes,
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
