from __future__ import annotations

import pytest
import torch
from torch import nn

from offstage.pipeline.errors import ConfigError
from offstage.stages.shard_load import set_module_tensor_to_device


def test_a_tensor_is_set_cast_and_kept_trainable() -> None:
    module = nn.Sequential(nn.Linear(2, 2, device="meta"))
    set_module_tensor_to_device(module, "0.weight", "cpu", value=torch.ones(2, 2, dtype=torch.float16))
    assert module[0].weight.dtype == torch.float32
    assert module[0].weight.requires_grad
    set_module_tensor_to_device(module, "0.weight", "cpu", dtype=torch.bfloat16)
    assert module[0].weight.dtype == torch.bfloat16
    set_module_tensor_to_device(module, "0.weight", "meta")
    assert module[0].weight.is_meta


def test_a_buffer_of_integers_keeps_its_dtype() -> None:
    module = nn.BatchNorm1d(2)
    set_module_tensor_to_device(module, "num_batches_tracked", "cpu", value=torch.tensor(3))
    assert module.num_batches_tracked.dtype == torch.int64


def test_tied_values_share_their_memory_where_a_map_is_given() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    value = torch.ones(2, 2)
    tied: dict = {value.data_ptr(): {}}
    for module in (first, second):
        set_module_tensor_to_device(module, "weight", "cpu", value=value, dtype=torch.float16, tied_params_map=tied)
    assert first.weight.data_ptr() == second.weight.data_ptr()


def test_a_buffer_that_shares_its_data_with_a_parameter_stays_a_buffer() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(2))
    module.register_buffer("seen", module.weight.detach())
    tied: dict = {module.weight.data_ptr(): {}}
    for name in ("weight", "seen"):
        set_module_tensor_to_device(module, name, "cpu", dtype=torch.float16, tied_params_map=tied)
    assert [name for name, _ in module.named_parameters()] == ["weight"]
    assert [name for name, _ in module.named_buffers()] == ["seen"]
    assert module.seen.data_ptr() == module.weight.data_ptr()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("nothing", None, "no parameter or buffer"),
        ("weight", None, "has no data to move"),
        ("weight", torch.ones(3), r"has shape \[2, 2\], and the value \[3\]"),
    ],
)
def test_a_tensor_that_cannot_be_set_is_refused(name: str, value: torch.Tensor | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        set_module_tensor_to_device(nn.Linear(2, 2, device="meta"), name, "cpu", value=value)


def test_a_tensor_that_is_there_already_stays_the_same_object() -> None:
    module = nn.Linear(2, 2)
    weight = module.weight
    set_module_tensor_to_device(module, "weight", "cpu")
    assert module.weight is weight


def test_a_value_takes_the_dtype_of_the_tensor_and_whole_numbers_keep_theirs() -> None:
    module = nn.BatchNorm1d(2)
    set_module_tensor_to_device(module, "weight", "cpu", value=torch.tensor([1, 2]))
    assert module.weight.dtype == torch.float32
    set_module_tensor_to_device(module, "num_batches_tracked", "cpu", value=torch.tensor(3), dtype="float16")
    assert module.num_batches_tracked.dtype == torch.int64


def test_tied_tensors_become_one_parameter_where_a_map_is_given() -> None:
    first, second, tied = nn.Linear(2, 2), nn.Linear(2, 2), {}
    second.weight = first.weight
    tied[first.weight.data_ptr()] = {}
    for module in (first, second):
        set_module_tensor_to_device(module, "weight", "meta", None, torch.float16, None, tied)
    assert first.weight is second.weight


def test_statistics_of_weights_of_8_bits_are_refused() -> None:
    with pytest.raises(ConfigError, match="fp16_statistics: weights of 8 bits"):
        set_module_tensor_to_device(nn.Linear(2, 2), "weight", "cpu", fp16_statistics=torch.ones(2))
