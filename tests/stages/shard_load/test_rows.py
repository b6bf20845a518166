"""Where the row of each expert lies on disk: assembled, the rows are what ``from_pretrained`` holds."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist, Transpose, WeightConverter

from stages.checkpoints.extents import Extent
from stages.checkpoints.shard_files import ShardFile
from stages.empty_init import init_empty_weights
from stages.shard_load.conversions import source_places
from stages.shard_load.expert_rows import locate_rows, read_rows
from stages.shard_load.names import Step
from tests.stages.empty_init.test_experts import CONFIGS
from tests.stages.shard_load.checkpoints import load, make_context, save_bin
from tests.stages.shard_load.test_conversions import MemoryReader


def make_mixture(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return a small mixture whose values are all different."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(deepcopy(CONFIGS[name]), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    return model.to(dtype).eval()


def offloaded(root: Path, name: str, checkpoint: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return what waits on disk of the checkpoint when all of it does."""

    def make() -> Any:
        with init_empty_weights():
            return AutoModelForCausalLM.from_config(deepcopy(CONFIGS[name]), dtype=dtype).eval()

    return load(make_context(root, checkpoint, make, lambda _: "disk"), root / "out").offloaded


def experts_of(checkpoint: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Return the tensors of experts that transformers makes of the checkpoint."""
    state = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).state_dict()
    return {name: tensor for name, tensor in state.items() if ".experts." in name}


def files_of(weights: Any, name: str) -> set[Path]:
    return {piece.file.path for row in weights.rows[name] for piece in row}


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_lie_in_the_checkpoint_and_are_what_transformers_makes(name: str, tmp_path: Path) -> None:
    make_mixture(name).save_pretrained(tmp_path / "checkpoint", max_shard_size="8KB")
    weights, wanted = offloaded(tmp_path, name, tmp_path / "checkpoint"), experts_of(tmp_path / "checkpoint")
    assert weights.rows.keys() == wanted.keys()
    for tensor, value in wanted.items():
        assert torch.equal(read_rows(weights.rows[tensor]), value), tensor
        assert len(weights.rows[tensor]) == len(value)
        assert {path.parent for path in files_of(weights, tensor)} == {tmp_path / "checkpoint"}
    assert len({path for tensor in wanted for path in files_of(weights, tensor)}) > 1


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
    assert locate_rows([(up, 6), (gate, 0)], (1, 3, 3), "bfloat16") == ((gate, up),)


def test_what_covers_several_rows_is_cut() -> None:
    stacked = replace(EXTENT, shape=(3, 2, 3))
    first, second, third = (replace(EXTENT, begin=100 + 12 * row) for row in range(3))
    assert locate_rows([(stacked, 0)], (3, 2, 3), "bfloat16") == ((first,), (second,), (third,))


@pytest.mark.parametrize(
    ("places", "shape", "dtype"),
    [
        ([(EXTENT, 0)], (1, 2, 3), "float32"),
        ([(EXTENT, 0), (EXTENT, 6)], (1, 3, 4), "bfloat16"),
        ([(EXTENT, 0)], (1, 2, 0), "bfloat16"),
    ],
    ids=["of another dtype", "that end within a step of a row", "of nothing"],
)
def test_other_places_give_no_rows(places: list[tuple[Extent, int]], shape: tuple[int, ...], dtype: str) -> None:
    assert locate_rows(places, shape, dtype) is None


OTHER_CHAINS = {
    "transposed": [MergeModulelist(0), Transpose(1, 2)],
    "stacked along another dimension": [MergeModulelist(1)],
    "joined within their steps": [MergeModulelist(0), Concatenate(2)],
    "unknown": [MergeModulelist(0), Chunk(0)],
}


@pytest.mark.parametrize("chain", OTHER_CHAINS)
def test_sources_that_do_not_lie_in_one_piece_have_no_places(chain: str) -> None:
    sources = {f"a.{expert}.{name}": torch.empty(4, 6) for expert in range(2) for name in ("w1", "w3")}
    patterns = ["a.*.w1", "a.*.w3"] if chain == "joined within their steps" else ["a.*.w1"]
    named = [(f"a.*.{name[-2:]}", name) for name in sources if f"a.*.{name[-2:]}" in patterns]
    shape = {"transposed": (2, 6, 4), "joined within their steps": (2, 4, 12)}.get(chain, (4, 2, 6))
    step = Step({"a.merged": shape}, tuple(named), WeightConverter(patterns, "a.merged", OTHER_CHAINS[chain]))
    assert source_places(step, MemoryReader(sources)) is None
