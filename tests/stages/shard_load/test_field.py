"""The field's functions, used as scripts written against accelerate use them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from pipeline.errors import CheckpointError, ConfigError, StorageError
from stages.shard_load import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    load_checkpoint_in_model,
    load_offloaded_weight,
    load_state_dict,
    offload_state_dict,
    offload_weight,
    set_module_tensor_to_device,
)
from tests.stages.shard_load.checkpoints import assert_same, empty_model, make_model, save_bin, save_safetensors

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.uint8]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 4)])
def test_a_weight_comes_back_from_disk(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape).to(dtype)
    index = offload_weight(weight, "a.b", tmp_path, {})
    assert index == {"a.b": {"dtype": str(dtype)[6:], "shape": list(shape)}}
    assert torch.equal(load_offloaded_weight(tmp_path / "a.b.dat", index["a.b"]), weight)


def test_the_files_are_the_fields(tmp_path: Path) -> None:
    offload_weight(torch.tensor([[1.5, 2.5]]), "a", tmp_path)
    assert np.array_equal(np.memmap(tmp_path / "a.dat", dtype="float32", shape=(1, 2), mode="r"), [[1.5, 2.5]])


def test_a_transposed_weight_is_written_as_it_reads(tmp_path: Path) -> None:
    weight = torch.arange(6.0).view(2, 3).t()
    index = offload_weight(weight, "a", tmp_path, {})
    assert torch.equal(load_offloaded_weight(tmp_path / "a.dat", index["a"]), weight)


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"dtype": "float32", "shape": [3]}, "8 bytes instead of the 12"),
        ({"dtype": "float31", "shape": [2]}, "unknown dtype 'float31'"),
    ],
)
def test_a_file_that_is_not_what_its_index_tells_is_refused(tmp_path: Path, info: dict, words: str) -> None:
    offload_weight(torch.ones(2), "a", tmp_path)
    with pytest.raises(CheckpointError, match=words):
        load_offloaded_weight(tmp_path / "a.dat", info)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"file: writing 'a' \(8 B\) failed"):
        offload_weight(torch.ones(2), "a", tmp_path / "file")


def test_the_loader_is_a_mapping_over_memory_folder_and_safetensors(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"disk": torch.ones(2), "both": torch.zeros(1)})
    save_file({"inner": torch.full((3,), 7.0)}, tmp_path / "x.safetensors")
    index = json.loads((tmp_path / "index.json").read_text())
    index["file"] = {"safetensors_file": str(tmp_path / "x.safetensors"), "weight_name": "inner", "dtype": "float16"}
    loader = OffloadedWeightsLoader({"both": torch.ones(1)}, tmp_path, index)
    assert sorted(loader) == ["both", "disk", "file"]
    assert len(loader) == 3
    assert torch.equal(loader["both"], torch.ones(1))
    assert torch.equal(loader["disk"], torch.ones(2))
    assert torch.equal(loader["file"], torch.full((3,), 7.0).half())
    assert OffloadedWeightsLoader(save_folder=tmp_path).keys() == {"disk", "both"}
    with pytest.raises(KeyError):
        loader["none"]
    with pytest.raises(ValueError, match="needs a state_dict"):
        OffloadedWeightsLoader()


def test_a_prefixed_dataset_looks_up_below_its_prefix() -> None:
    dataset = PrefixedDataset({"a.w": torch.ones(1), "a.b": torch.zeros(1), "c": torch.ones(2)}, "a.")
    assert torch.equal(dataset["w"], torch.ones(1))
    assert list(dataset) == ["a.w", "a.b"]
    assert len(dataset) == 2


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


@pytest.mark.parametrize("save", [save_safetensors, save_bin])
@pytest.mark.parametrize("kind", ["llama", "opt", "mixtral"])
def test_a_checkpoint_is_loaded_by_a_map_and_its_disk_part_read_through_the_loader(
    tmp_path: Path, kind: str, save: object
) -> None:
    source = make_model(kind, torch.bfloat16)
    folder, offload = save(source, tmp_path / "checkpoint"), tmp_path / "offload"
    model = empty_model(kind, torch.bfloat16)
    base = "model.decoder" if kind == "opt" else "model"
    device_map = {"": "cpu", f"{base}.layers.1": "disk", f"{base}.embed_tokens": "disk", "lm_head": "disk"}
    load_checkpoint_in_model(model, folder, device_map, offload_folder=offload)
    loader = OffloadedWeightsLoader(save_folder=offload)
    state = model.state_dict()
    assert {name for name, t in state.items() if t.is_meta} == set(loader)
    assert_same({name: loader.get(name, t) for name, t in state.items()}, source.state_dict())


def test_without_a_map_all_is_loaded_to_the_host_in_the_dtype_asked_for(tmp_path: Path) -> None:
    source = make_model("llama")
    model = empty_model("llama", torch.float32)
    load_checkpoint_in_model(model, save_safetensors(source, tmp_path / "c"), dtype="float16")
    assert_same(model.state_dict(), source.half().state_dict())


@pytest.mark.parametrize(
    ("device_map", "folder", "words"),
    [
        ({"model": "cpu"}, None, "device_map: leaves out 'lm_head.weight'"),
        ({"": "disk"}, None, "offload_folder: tensors are mapped to disk"),
        ({"": "disk"}, "other", "holds weights of something else"),
    ],
)
def test_a_load_that_cannot_be_carried_out_is_refused(
    tmp_path: Path, device_map: dict, folder: str | None, words: str
) -> None:
    offload_state_dict(tmp_path / "other", {"a": torch.ones(1)})
    checkpoint = save_safetensors(make_model("llama"), tmp_path / "c")
    with pytest.raises(ConfigError, match=words):
        load_checkpoint_in_model(
            empty_model("llama", torch.float32), checkpoint, device_map, folder and tmp_path / folder
        )


def test_without_strict_unexpected_tensors_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Linear(2, 2)
    save_file({**module.state_dict(), "more": torch.ones(1)}, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match="1 unexpected: 'more'"):
        load_checkpoint_in_model(nn.Linear(2, 2), tmp_path / "m.safetensors")
    loaded = nn.Linear(2, 2)
    load_checkpoint_in_model(loaded, tmp_path / "m.safetensors", strict=False)
    assert_same(loaded.state_dict(), module.state_dict())
    assert "'more'" in caplog.text


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_file_is_loaded_as_a_state_dict(tmp_path: Path, suffix: str) -> None:
    state = {"a.w": torch.ones(2), "b": torch.arange(3)}
    path = tmp_path / f"x.{suffix}"
    save_file(state, path) if suffix == "safetensors" else torch.save(state, path)
    assert_same(load_state_dict(path), state)
    assert_same(load_state_dict(str(path), device_map={"a": "cpu", "": "disk"}), state)
