"""A checkpoint that holds experts one by one, and one of them is wrong: the error names that one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from offstage.pipeline.errors import CheckpointError
from offstage.stages.empty_init.siblings import missing_sibling
from tests.stages.shard_load.test_rows import make_mixture, offloaded

EXPERTS = "model.layers.0.block_sparse_moe.experts"
Tensors = dict[str, torch.Tensor]


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def changed(name: str, tensor: torch.Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: tensor}


FAULTS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "one of an expert's tensors is missing": (
        without(f"{EXPERTS}.2.w1.weight"),
        f"'{EXPERTS}.2.w1.weight' is missing, so 'model.layers.0.mlp.experts.gate_up_proj' can't be made",
    ),
    "one that is alone in its row is missing": (
        without(f"{EXPERTS}.2.w2.weight"),
        rf"down_proj' is \[5, 32, 24\] instead of \[6, 32, 24\] \(there is no '{EXPERTS}.2.w2.weight'\)",
    ),
    "an expert is missing": (
        without(*(f"{EXPERTS}.2.{part}.weight" for part in ("w1", "w2", "w3"))),
        rf"gate_up_proj' is \[5, 48, 32\] instead of \[6, 48, 32\] \(there is no '{EXPERTS}.2.w1.weight'\)",
    ),
    "the last expert is missing": (
        without(*(f"{EXPERTS}.5.{part}.weight" for part in ("w1", "w2", "w3"))),
        r"gate_up_proj' is \[5, 48, 32\] instead of \[6, 48, 32\],",
    ),
    "all are missing": (
        without(*(f"{EXPERTS}.{expert}.w2.weight" for expert in range(6))),
        "1 missing: 'model.layers.0.mlp.experts.down_proj'",
    ),
    "one is of another shape": (
        changed(f"{EXPERTS}.2.w1.weight", torch.zeros(24, 33, dtype=torch.bfloat16)),
        rf"'{EXPERTS}.2.w1.weight' is \[24, 33\] where others like it are \[24, 32\], so 'model.layers.0.mlp.experts",
    ),
    "one is of another kind of number": (
        changed(f"{EXPERTS}.2.w1.weight", torch.zeros(24, 32, dtype=torch.int8)),
        f"1 of another kind of number: '{EXPERTS}.2.w1.weight' is int8 where bfloat16 belongs",
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtral")
    make_mixture("Mixtral").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("fault", FAULTS)
def test_the_expert_that_is_wrong_is_named_in_one_line(fault: str, saved: Path, tmp_path: Path) -> None:
    change, words = FAULTS[fault]
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_bytes((saved / "config.json").read_bytes())
    tensors = change(load_file(saved / "model.safetensors"))
    save_file(tensors, tmp_path / "checkpoint" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=words) as raised:
        offloaded(tmp_path, "Mixtral", tmp_path / "checkpoint")
    assert "\n" not in str(raised.value)
    assert str(tmp_path / "checkpoint") in str(raised.value)


def test_an_expert_of_another_float_type_is_cast_with_the_others(saved: Path, tmp_path: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    name = f"{EXPERTS}.2.w1.weight"
    save_file({**tensors, name: tensors[name].float()}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    weights = offloaded(tmp_path, "Mixtral", tmp_path / "model.safetensors")
    assert weights.extents.keys() & weights.rows.keys() == {"model.layers.0.mlp.experts.gate_up_proj"}
    row = weights["model.layers.0.mlp.experts.gate_up_proj"][2]
    assert torch.equal(row, torch.cat([tensors[name], tensors[f"{EXPERTS}.2.w3.weight"]]))


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["a.0.w", "a.2.w"], "a.1.w"),
        (["a.1.w", "a.2.w"], None),
        (["a.10.w", "a.9.w", "a.12.w"], "a.11.w"),
        (["0", "2"], "1"),
        (["a.0.w", "b.2.w"], None),
        (["a.x.w", "a.y.w"], None),
        (["a.0.w", "a.2"], None),
        (["a.0.w"], None),
        ([], None),
    ],
)
def test_a_gap_in_the_numbers_tells_the_name(names: list[str], missing: str | None) -> None:
    assert missing_sibling([("a.*.w", name) for name in names]) == missing
