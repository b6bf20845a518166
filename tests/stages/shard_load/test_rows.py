"""Where the row of each expert lies on disk: assembled, the rows are what ``from_pretrained`` holds."""

import json
import os
import time
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist, Transpose, WeightConverter

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.adapters import open_adapter
from offstage.stages.checkpoints.checkpoint import open_checkpoint
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.empty_init import init_empty_weights
from offstage.stages.empty_init.adapted_model import add_adapter
from offstage.stages.empty_init.describe import describe
from offstage.stages.empty_init.merges import sources_in_order
from offstage.stages.empty_init.names import NamingStep
from offstage.stages.plan.plan import LoadPlan
from offstage.stages.shard_load import OffloadedWeightsLoader
from offstage.stages.shard_load.checkpoint_match import prepare, prepare_adapted
from offstage.stages.shard_load.expert_rows import locate_rows, read_rows
from offstage.stages.shard_load.functions import fill_model
from offstage.stages.shard_load.sources import find_sources
from offstage.stages.shard_load.stage import ShardLoadStage
from tests.stages.empty_init.test_experts import CONFIGS
from tests.stages.shard_load.checkpoints import assert_same, load, make_context, save_bin
from tests.stages.shard_load.test_model_tensors import MemoryReader
from tests.stages.shard_load.test_stage import flip_last_bit


def make_mixture(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return a small mixture whose values are all different."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(deepcopy(CONFIGS[name]), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    return model.to(dtype).eval()


def empty_mixture(name: str) -> Any:
    with init_empty_weights():
        return AutoModelForCausalLM.from_config(deepcopy(CONFIGS[name]), dtype=torch.bfloat16).eval()


def kept_wider(name: str) -> dict[str, torch.Tensor]:
    """Return what the empty mixture has in another dtype: of its routers, what transformers declares in float32."""
    return {key: tensor for key, tensor in empty_mixture(name).state_dict().items() if tensor.dtype != torch.bfloat16}


def offloaded(root: Path, name: str, checkpoint: Path, **options: Any) -> Any:
    """Return what waits on disk of the checkpoint when all of it does and experts are brought one by one."""

    make = partial(empty_mixture, name)
    context = make_context(root, checkpoint, make, lambda _: "disk", **{"routes": True, **options})
    return load(context, root / "out").offloaded


def experts_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of experts that transformers makes of the checkpoint; a bias, so little that it comes whole,
    left out.
    """
    state = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).state_dict()
    return {name: tensor for name, tensor in state.items() if ".experts." in name and "down_proj_bias" not in name}


def files_of(weights: Any, name: str) -> set[Path]:
    return {piece.file.path for row in weights.rows[name] for piece in row}


STACKED = ("gpt-oss", "Granite-MoE")
"""Those whose checkpoints hold the experts stacked."""


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_lie_in_the_checkpoint_and_are_what_transformers_makes(name: str, tmp_path: Path) -> None:
    make_mixture(name).save_pretrained(tmp_path / "checkpoint", max_shard_size="8KB")
    weights, wanted = offloaded(tmp_path, name, tmp_path / "checkpoint"), experts_of(tmp_path / "checkpoint")
    assert weights.rows.keys() == wanted.keys()
    for tensor, value in wanted.items():
        assert torch.equal(read_rows(weights.rows[tensor]), value), tensor
        assert torch.equal(weights[tensor], value), tensor
        assert len(weights.rows[tensor]) == len(value)
        assert {path.parent for path in files_of(weights, tensor)} == {tmp_path / "checkpoint"}
        assert (tensor in weights.extents) == (name in STACKED)
    assert len({path for tensor in wanted for path in files_of(weights, tensor)}) > 1


@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_of_a_checkpoint_in_the_dtype_of_the_run_is_stored(name: str, tmp_path: Path) -> None:
    model = make_mixture(name)
    model.save_pretrained(tmp_path / "checkpoint")
    weights, wider = offloaded(tmp_path, name, tmp_path / "checkpoint"), kept_wider(name)
    assert set(weights) == set(model.state_dict())
    assert len(weights) == len(set(weights))
    assert {path.stem for path in tmp_path.rglob("*.dat")} == set(wider)
    report = json.loads((tmp_path / "out" / "load_report.json").read_text())
    assert report["stored"] == {"tensors": len(wider), "bytes": sum(weight.nbytes for weight in wider.values())}
    assert report["served"]["bytes"] == sum(
        weight.nbytes for key, weight in model.state_dict().items() if key not in wider
    )


def test_the_artifact_says_of_which_tensors_experts_are_made(tmp_path: Path) -> None:
    make_mixture("Qwen2-MoE").save_pretrained(tmp_path / "checkpoint")
    offloaded(tmp_path, "Qwen2-MoE", tmp_path / "checkpoint")
    index = json.loads((tmp_path / "out" / "offload_index.json").read_text())
    layer = "model.layers.1.mlp.experts"
    assert index[f"{layer}.gate_up_proj"] == {
        "source": "checkpoint",
        "tensors": [f"{layer}.{expert}.{part}_proj.weight" for expert in range(6) for part in ("gate", "up")],
        "dtype": "bfloat16",
        "shape": [6, 32, 32],
    }
    assert "offsets" in index["model.layers.1.mlp.gate.weight"]


def test_where_no_expert_is_brought_by_itself_the_store_has_them_stacked(tmp_path: Path) -> None:
    make_mixture("Mixtral").save_pretrained(tmp_path / "checkpoint")
    weights = offloaded(tmp_path, "Mixtral", tmp_path / "checkpoint", routes=False)
    assert weights.rows
    for tensor, rows in weights.rows.items():
        assert weights.extents[tensor].file.path.suffix == ".dat"
        assert torch.equal(read_rows(rows), weights[tensor])


def test_plans_that_serve_experts_otherwise_do_not_share_an_artifact(tmp_path: Path) -> None:
    make_mixture("Mixtral").save_pretrained(tmp_path / "checkpoint")
    make = partial(empty_mixture, "Mixtral")
    contexts = [
        make_context(tmp_path / str(routes), tmp_path / "checkpoint", make, lambda _: "disk", routes=routes)
        for routes in (False, True)
    ]
    first, second = (ShardLoadStage().gather(context) for context in contexts)
    assert first != second


def test_an_offload_folder_has_an_entry_for_experts_and_no_copy(tmp_path: Path) -> None:
    make_mixture("Mixtral").save_pretrained(tmp_path / "checkpoint", max_shard_size="8KB")
    model, wanted = empty_mixture("Mixtral"), experts_of(tmp_path / "checkpoint")
    skeleton, checkpoint = describe(model, rehearsed=False), open_checkpoint(tmp_path / "checkpoint")
    homes = {spec.name: "disk" for spec in skeleton.tensors}
    prepared = prepare(model, skeleton, checkpoint=checkpoint)
    sources = find_sources(prepared, LoadPlan(homes, by_expert=frozenset(wanted)))
    fill_model(prepared, sources, tmp_path / "folder", spills=False)
    assert not list((tmp_path / "folder").glob("*.dat"))
    loader = OffloadedWeightsLoader(save_folder=tmp_path / "folder")
    assert_same({name: loader[name] for name in wanted}, wanted)
    assert set(loader) == set(model.state_dict())


def test_beside_an_adapter_experts_lie_in_the_checkpoint_or_in_the_adapter(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="the extra adapter isn't installed")
    model, saved = make_mixture("Mixtral"), "model.layers.1.mlp.experts"
    model.save_pretrained(tmp_path / "checkpoint")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["layers.1.mlp.experts"])
    peft.get_peft_model(model, settings).save_pretrained(tmp_path / "adapter")
    adapted = empty_mixture("Mixtral")
    add_adapter(adapted, tmp_path / "adapter")
    skeleton = describe(adapted, rehearsed=False)
    names = [name for spec in skeleton.experts for name in spec.tensors]
    checkpoint, adapter = open_checkpoint(tmp_path / "checkpoint"), open_adapter(tmp_path / "adapter")
    homes = {spec.name: "disk" for spec in skeleton.tensors}
    loads = prepare_adapted(adapted, skeleton, checkpoint=checkpoint, adapter=adapter)
    tables = [find_sources(load, LoadPlan(homes, by_expert=frozenset(names))) for load in loads]
    by_table = [{source.outer for source in sources.values() if source.rows} for sources in tables]
    assert by_table[0] | by_table[1] == set(names)
    assert {name for name in names if saved in name} == by_table[1]


def test_a_shard_that_is_cut_short_is_noticed_when_an_expert_is_read(tmp_path: Path) -> None:
    make_mixture("Mixtral").save_pretrained(tmp_path / "checkpoint")
    weights = offloaded(tmp_path, "Mixtral", tmp_path / "checkpoint")
    shard = tmp_path / "checkpoint" / "model.safetensors"
    os.truncate(shard, shard.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*"):
        weights["model.layers.2.mlp.experts.down_proj"]


def test_with_verify_full_an_expert_that_is_read_is_what_was_hashed(tmp_path: Path) -> None:
    make_mixture("Mixtral").save_pretrained(tmp_path / "checkpoint")
    weights = offloaded(tmp_path, "Mixtral", tmp_path / "checkpoint", verify="full")
    weights["model.layers.2.mlp.experts.down_proj"]
    time.sleep(0.02)  # longer than the clock of the file system stands still
    flip_last_bit(tmp_path / "checkpoint" / "model.safetensors")
    with pytest.raises(CheckpointError, match="changed while it was being served"):
        weights["model.layers.2.mlp.experts.down_proj"]


def test_an_expert_that_is_not_finite_is_named(tmp_path: Path) -> None:
    model = make_mixture("Mixtral")
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[4, 0, 0] = torch.nan
    model.save_pretrained(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match=r"layers\.1\.block_sparse_moe\.experts\.4\.w2\.weight' holds NaN"):
        offloaded(tmp_path, "Mixtral", tmp_path / "checkpoint", check_finite=True)


@pytest.mark.parametrize("name", ["Mixtral", "gpt-oss"])
def test_rows_of_another_dtype_are_slices_of_the_store(name: str, tmp_path: Path) -> None:
    make_mixture(name, torch.float32).save_pretrained(tmp_path / "checkpoint")
    weights, wanted = offloaded(tmp_path, name, tmp_path / "checkpoint"), experts_of(tmp_path / "checkpoint")
    assert weights.rows.keys() == wanted.keys()
    for tensor, value in wanted.items():
        assert torch.equal(read_rows(weights.rows[tensor]), value), tensor
        assert files_of(weights, tensor) == {weights.extents[tensor].file.path}


def test_rows_of_a_pickle_are_slices_of_the_store(tmp_path: Path) -> None:
    model = make_mixture("Mixtral")
    save_bin(model, tmp_path / "checkpoint", sharded=True)
    weights = offloaded(tmp_path, "Mixtral", tmp_path / "checkpoint")
    assert weights.rows
    for tensor, rows in weights.rows.items():
        assert torch.equal(read_rows(rows), model.state_dict()[tensor]), tensor
        assert files_of(weights, tensor) == {weights.extents[tensor].file.path}


EXTENT = Extent(ShardFile("f", Path("f"), 0, None, ""), 100, "bfloat16", (2, 3))


def test_a_row_is_its_parts_along_its_first_dimension() -> None:
    gate, up = EXTENT, replace(EXTENT, begin=500, shape=(1, 3))
    assert locate_rows([gate, up], (1, 3, 3), "bfloat16") == ((gate, up),)


def test_what_covers_several_rows_is_cut() -> None:
    stacked = replace(EXTENT, shape=(3, 2, 3))
    first, second, third = (replace(EXTENT, begin=100 + 12 * row) for row in range(3))
    assert locate_rows([stacked], (3, 2, 3), "bfloat16") == ((first,), (second,), (third,))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 2, 3), "float32"), ((3, 1, 4), "bfloat16"), ((3, 2, 3), "bfloat16"), ((12,), "bfloat16"), ((), "bfloat16")],
    ids=["of another dtype", "that end within a step of a row", "that are fewer", "of numbers", "of one number"],
)
def test_other_extents_give_no_rows(shape: tuple[int, ...], dtype: str) -> None:
    assert locate_rows([EXTENT, EXTENT], shape, dtype) == ()


def test_tensors_of_nothing_have_no_rows() -> None:
    assert locate_rows([replace(EXTENT, shape=(2**40, 0))], (2**40, 0), "bfloat16") == ()


OTHER_CHAINS = {
    "transposed": [MergeModulelist(0), Transpose(1, 2)],
    "stacked along another dimension": [MergeModulelist(1)],
    "joined within their steps": [MergeModulelist(0), Concatenate(2)],
    "unknown": [MergeModulelist(0), Chunk(0)],
}


@pytest.mark.parametrize("chain", OTHER_CHAINS)
def test_sources_that_do_not_lie_in_one_piece_have_no_order(chain: str) -> None:
    sources = {f"a.{expert}.{name}": torch.empty(4, 6) for expert in range(2) for name in ("w1", "w3")}
    patterns = ["a.*.w1", "a.*.w3"] if chain == "joined within their steps" else ["a.*.w1"]
    named = [(f"a.*.{name[-2:]}", name) for name in sources if f"a.*.{name[-2:]}" in patterns]
    shape = {"transposed": (2, 6, 4), "joined within their steps": (2, 4, 12)}.get(chain, (4, 2, 6))
    step = NamingStep({"a.merged": shape}, tuple(named), WeightConverter(patterns, "a.merged", OTHER_CHAINS[chain]))
    assert sources_in_order(step, MemoryReader(sources).entries) == ()
