"""The field's functions, used as scripts written against accelerate use them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from offstage.pipeline.errors import CheckpointError, ConfigError, StorageError
from offstage.stages.checkpoints.safetensors_header import read_header
from offstage.stages.shard_load import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    load_checkpoint_in_model,
    load_offloaded_weight,
    load_state_dict,
    offload_folder,
    offload_state_dict,
    offload_weight,
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


def test_an_offload_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    folder = save_safetensors(make_model("llama"), tmp_path / "checkpoint")
    (tmp_path / "file").touch()
    model = empty_model("llama", torch.float32)
    with pytest.raises(StorageError, match=r"file/below: the offload folder can't be used: Not a directory"):
        load_checkpoint_in_model(model, folder, {"": "disk"}, offload_folder=tmp_path / "file" / "below")


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


class Grown(nn.Module):
    """A model whose checkpoint has a ``body`` and no ``head``."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 2), nn.Linear(2, 1)


def test_unexpected_and_missing_tensors_are_warnings_that_list_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    body = nn.Linear(2, 2)
    save_file({"body.weight": body.weight, "body.bias": body.bias, "more": torch.ones(1)}, tmp_path / "m.safetensors")
    model = Grown()
    head = model.head.weight
    load_checkpoint_in_model(model, tmp_path / "m.safetensors")
    assert_same(model.body.state_dict(), body.state_dict())
    assert model.head.weight is head
    assert "were not used when loading, the model has no place for them: 'more'" in caplog.text
    assert "the model keeps what it has: 'head.weight', 'head.bias'" in caplog.text
    with pytest.raises(CheckpointError, match=r"2 missing: 'head\.weight', 'head\.bias'; 1 unexpected: 'more'"):
        load_checkpoint_in_model(Grown(), tmp_path / "m.safetensors", strict=True)


def test_a_missing_parameter_that_stays_on_meta_is_said_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_file({"body.weight": torch.ones(2, 2), "body.bias": torch.ones(2)}, tmp_path / "m.safetensors")
    model = Grown().to("meta")
    load_checkpoint_in_model(model, tmp_path / "m.safetensors", {"": "cpu"})
    assert model.head.weight.is_meta
    assert "stay on the meta device, give them values: 'head.weight', 'head.bias'" in caplog.text
    assert "the model keeps" not in caplog.text


def test_parameters_require_gradients_as_they_did(tmp_path: Path) -> None:
    save_file({"body.weight": torch.ones(2, 2), "body.bias": torch.ones(2)}, tmp_path / "m.safetensors")
    model = Grown()
    model.body.bias.requires_grad_(False)
    load_checkpoint_in_model(model, tmp_path / "m.safetensors", {"body.weight": "cpu", "": "disk"}, tmp_path / "o")
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == ["body.bias"]
    assert model.body.bias.is_meta


def test_named_modules_stay_in_float32_when_the_rest_is_float16(tmp_path: Path) -> None:
    save_file(Grown().state_dict(), tmp_path / "m.safetensors")
    model, other = Grown(), Grown()
    load_checkpoint_in_model(model, tmp_path / "m.safetensors", dtype="float16", keep_in_fp32_modules=["head"])
    assert {name: t.dtype for name, t in model.named_parameters() if name.endswith("weight")} == {
        "body.weight": torch.float16,
        "head.weight": torch.float32,
    }
    load_checkpoint_in_model(other, tmp_path / "m.safetensors", dtype="bfloat16", keep_in_fp32_modules=["head"])
    assert other.head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("option", ["offload_8bit_bnb", "broadcast_from_rank0"])
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, option: str) -> None:
    save_file(Grown().state_dict(), tmp_path / "m.safetensors")
    with pytest.raises(ConfigError, match=f"{option}: True is not supported: .*; leave it out"):
        load_checkpoint_in_model(Grown(), tmp_path / "m.safetensors", **{option: True})
    load_checkpoint_in_model(Grown(), tmp_path / "m.safetensors", full_state_dict=False)


@pytest.mark.parametrize("named", ["embed", "head"])
def test_a_name_that_the_map_leaves_out_follows_its_twin(
    tmp_path: Path, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    save_file({"embed.weight": model["embed"].weight.detach()}, tmp_path / "m.safetensors")
    load_checkpoint_in_model(model, tmp_path / "m.safetensors", {named: "disk"}, tmp_path / "o")
    assert model["head"].weight is model["embed"].weight
    assert model["head"].weight.is_meta
    both = {**dict.fromkeys(("embed", "head"), "cpu"), named: "disk"}
    load_checkpoint_in_model(model, tmp_path / "m.safetensors", both, tmp_path / "o")
    assert "one tied tensor is mapped to several devices" in caplog.text
    assert not model["head"].weight.is_meta, "the faster device counts"


def test_a_buffer_that_no_checkpoint_holds_need_not_be_on_the_map(tmp_path: Path) -> None:
    model = make_model("llama")
    names = [name for name, _ in model.model.named_children() if name != "rotary_emb"]
    device_map = {**{f"model.{name}": "cpu" for name in names}, "lm_head": "cpu"}
    load_checkpoint_in_model(model, save_safetensors(make_model("llama"), tmp_path / "c"), device_map)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_file_is_loaded_as_a_state_dict(tmp_path: Path, suffix: str) -> None:
    state = {"a.w": torch.ones(2), "b": torch.arange(3)}
    path = tmp_path / f"x.{suffix}"
    save_file(state, path) if suffix == "safetensors" else torch.save(state, path)
    assert_same(load_state_dict(path), state)
    assert_same(load_state_dict(str(path), device_map={"a": "cpu", "": "disk"}), state)
    assert_same(load_state_dict(str(path), device_map={"a": "cpu"}), state)


def test_a_shards_header_is_read_once_and_again_where_the_file_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, headers = tmp_path / "x.safetensors", []
    monkeypatch.setattr(offload_folder, "read_header", lambda p: headers.append(p) or read_header(p))
    save_file({"a": torch.ones(2), "b": torch.zeros(3)}, path)
    entries = {name: {"safetensors_file": str(path), "weight_name": name} for name in "ab"}
    loader = OffloadedWeightsLoader(index=entries)
    assert [loader[name].shape for name in "abab"] == [(2,), (3,), (2,), (3,)]
    assert len(headers) == 1
    save_file({"b": torch.full((5,), 7.0), "a": torch.ones(2)}, path)
    assert torch.equal(loader["b"], torch.full((5,), 7.0))
    assert len(headers) == 2
