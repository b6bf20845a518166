"""Weights of an FP8 checkpoint: read whole, from disk for each use, or kept in memory as they rest."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config, LlamaConfig, Qwen3MoeConfig
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.checkpoint import open_checkpoint
from offstage.stages.checkpoints.packed import AtRest, MemoryFile, PackedTensor, files_of
from offstage.stages.checkpoints.readers import read_extent
from offstage.stages.empty_init import init_empty_weights
from offstage.stages.empty_init.describe import describe
from offstage.stages.plan.plan import LoadPlan
from offstage.stages.shard_load.checkpoint_match import Load, prepare
from offstage.stages.shard_load.offload_store import open_store
from offstage.stages.shard_load.place import place
from offstage.stages.shard_load.sources import Sources, find_sources
from offstage.stages.shard_load.stored_weights import fill_store
from offstage.stages.units import DeviceId
from tests.packed_references import unpacked_fp8

SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}


def write(model: Any, folder: Path) -> Path:
    """Write ``model`` in FP8 into ``folder``, and what transformers dequantises it to into ``folder/plain``."""
    settings = FineGrainedFP8Config(modules_to_not_convert=["lm_head"])
    quantiser = Fp8Quantize(SimpleNamespace(quantization_config=settings))
    model.save_pretrained(folder / "plain")
    file = folder / "plain" / "model.safetensors"
    saved: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(file).items():
        packs = tensor.dim() > 1 and "_proj" in name
        parts = quantiser.convert({name: tensor}) if packs else {name: tensor}
        saved |= parts
        plain[name] = unpacked_fp8(parts[name], parts[f"{name}_scale_inv"]) if packs else tensor
    save_file(saved, folder / "model.safetensors", {"format": "pt"})
    save_file(plain, file, {"format": "pt"})
    model.config.quantization_config = settings.to_dict()
    model.config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, num_hidden_layers=2, **SIZES)
    return write(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture whose checkpoint has its experts one by one."""
    torch.manual_seed(0)
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    config = Qwen3MoeConfig(vocab_size=64, num_hidden_layers=2, head_dim=64, **SIZES, **experts)
    return write(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), tmp_path_factory.mktemp("mixture"))


@pytest.fixture
def plain(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "plain" / "model.safetensors")


def loading(
    folder: Path, home: DeviceId, dtype: torch.dtype = torch.bfloat16, **wanted: Collection[str]
) -> tuple[Load, Sources]:
    """Return the load of a folder whose tensors all lie at ``home``, and its table; ``wanted`` goes to the plan."""
    config: Any = AutoConfig.from_pretrained(folder)
    vars(config).pop("quantization_config", None)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    skeleton = describe(model, rehearsed=False)
    homes: dict[str, DeviceId] = {spec.name: home for spec in skeleton.tensors}
    load = prepare(model, skeleton, checkpoint=open_checkpoint(folder))
    names = {key: frozenset(tensors) for key, tensors in wanted.items()}
    return load, find_sources(load, LoadPlan(homes, **names))


def to_store(sources: Sources) -> set[str]:
    return {name for name, source in sources.items() if source.wants_store}


def stacks(folder: Path) -> list[str]:
    """Return the tensors of experts of the model in ``folder``."""
    return sorted(loading(folder, "disk")[0].expert_names)


def test_what_is_resident_is_as_transformers_dequantises_it(folder: Path, plain: dict[str, torch.Tensor]) -> None:
    placed = place(*loading(folder, "cpu"))
    state = placed.model.state_dict()
    assert state.keys() == plain.keys()
    for name, tensor in plain.items():
        assert torch.equal(state[name], tensor), name
    assert placed.read_bytes < 0.6 * sum(tensor.nbytes for tensor in plain.values())


def test_what_lies_on_disk_is_served_from_where_it_lies(folder: Path, plain: dict[str, torch.Tensor]) -> None:
    load, sources = loading(folder, "disk")
    assert not to_store(sources)
    offloaded = place(load, sources).offloaded
    for name, tensor in plain.items():
        assert torch.equal(offloaded[name], tensor), name
    assert isinstance(offloaded.extents["model.layers.0.mlp.up_proj.weight"], PackedTensor)


def test_what_rests_packed_in_memory_is_read_once_and_unpacked_from_there(
    folder: Path, plain: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [name for name in plain if "_proj" in name and ".0." in name]
    load, sources = loading(folder, "cpu", packed_on_host=[*names, "model.norm.weight"])
    placed = place(replace(load, check_finite=True), sources)
    assert set(placed.offloaded.extents) == set(names)
    for name, source in placed.offloaded.extents.items():
        assert isinstance(source, PackedTensor)
        assert all(isinstance(part.file, MemoryFile) for part in source.parts)
        assert placed.model.get_parameter(name).is_meta
    resident_bytes = sum(source.spec.bytes for source in sources.values() if source.way == "resident")
    assert resident_bytes == sum(tensor.nbytes for name, tensor in plain.items() if name not in names)
    monkeypatch.setattr("os.preadv", None)
    for name in names:
        assert torch.equal(placed.offloaded[name], plain[name]), name


def test_numbers_that_are_none_are_refused_where_they_rest_packed(folder: Path, tmp_path: Path) -> None:
    saved = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    saved[name].view(torch.uint8)[3, 5] = 0x7F
    save_file(saved, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    load, sources = loading(tmp_path, "cpu", packed_on_host=[name])
    with pytest.raises(CheckpointError, match=r"down_proj.weight' holds NaN or infinity as bfloat16"):
        place(replace(load, check_finite=True), sources)


def test_what_is_unpacked_to_the_dtype_of_the_run_need_not_be_stored(
    folder: Path, plain: dict[str, torch.Tensor]
) -> None:
    assert to_store(loading(folder, "disk", torch.float32)[1]) == {name for name in plain if "_proj" not in name}
    state = place(*loading(folder, "cpu", torch.float32)).model.state_dict()
    for name, tensor in plain.items():
        assert torch.equal(state[name].bfloat16(), tensor), name


def test_experts_that_are_merged_from_packed_tensors_are_those_of_the_plain_checkpoint(mixture: Path) -> None:
    state = place(*loading(mixture, "cpu")).model.state_dict()
    wanted = place(*loading(mixture / "plain", "cpu")).model.state_dict()
    assert state.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(state[name], tensor), name


def test_experts_on_disk_are_served_one_by_one_from_what_is_packed(mixture: Path) -> None:
    load, sources = loading(mixture, "disk", by_expert=stacks(mixture))
    assert not to_store(sources)
    offloaded, wanted = place(load, sources).offloaded, place(*loading(mixture / "plain", "cpu")).model.state_dict()
    assert len(offloaded.rows) == 4
    for name, tensor in wanted.items():
        assert torch.equal(offloaded[name], tensor), name


def test_where_no_expert_is_brought_alone_the_store_has_them_unpacked(mixture: Path, tmp_path: Path) -> None:
    load, sources = loading(mixture, "disk")
    assert to_store(sources) == load.expert_names
    filled = fill_store(load, sources, open_store(tmp_path / "store", load.store_key))
    offloaded, wanted = place(load, filled).offloaded, place(*loading(mixture / "plain", "cpu")).model.state_dict()
    for name in load.expert_names:
        assert torch.equal(offloaded[name], wanted[name]), name


@pytest.mark.parametrize("codec", ["fp8", "zstd"])
def test_experts_that_rest_packed_in_memory_are_had_one_by_one(codec: str, mixture: Path, tmp_path: Path) -> None:
    names = stacks(mixture)
    folder, packs = (mixture, []) if codec == "fp8" else (mixture / "plain", names)
    load, sources = loading(folder, "cpu", packed_on_host=names, by_expert=names, packs=packs)
    filled = fill_store(load, sources, open_store(tmp_path / "store", load.store_key)) if packs else sources
    placed = place(replace(load, check_finite=True), filled)
    for path in [*tmp_path.rglob("*.dat")]:
        path.unlink()
    wanted = place(*loading(mixture / "plain", "cpu")).model.state_dict()
    assert placed.offloaded.rows.keys() == set(names) == set(placed.offloaded)
    for name in names:
        rows = placed.offloaded.rows[name]
        assert not any(files_of(piece) for row in rows for piece in row)
        assert torch.equal(placed.offloaded[name], wanted[name]), name
        assert torch.equal(torch.stack([torch.cat([*map(flat, row)]) for row in rows]), wanted[name]), name


def flat(piece: AtRest) -> torch.Tensor:
    """Return a row, or a part of one, without the dimension that a packed stack keeps."""
    tensor = read_extent(piece)
    return tensor[0] if tensor.dim() == 3 else tensor
