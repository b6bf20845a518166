from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
)

from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.empty_init.merges import sources_in_order
from offstage.stages.empty_init.names import NamingStep
from offstage.stages.shard_load import model_tensors
from offstage.stages.shard_load.model_tensors import build

FILE = ShardFile("f", Path("f"), 0, None, "")


class MemoryReader:
    """Sources in memory; ``whole`` counts those that were handed over whole."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors, self.whole = tensors, 0
        self.entries = {name: Extent(FILE, 0, str(t.dtype)[6:], tuple(t.shape)) for name, t in tensors.items()}

    def fill(self, places: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, target in places:
            target.copy_(self.tensors[name])

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        self.whole += 1
        return self.tensors[name].to(dtype)


class Model(torch.nn.Module):
    config = None


CHAINS = {
    "merged and concatenated": (["a.*.w1", "a.*.w3"], [MergeModulelist(0), Concatenate(1)]),
    "merged": (["a.*.w1"], [MergeModulelist(0)]),
    "merged in another dimension": (["a.*.w1"], [MergeModulelist(-1)]),
    "merged and transposed": (["a.*.w1"], [MergeModulelist(0), Transpose(1, 2)]),
    "transposed": (["a.w1"], [Transpose(0, 1)]),
    "concatenated": (["a.w1", "a.w3"], [Concatenate(0)]),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chain", CHAINS)
def test_a_merge_is_what_transformers_makes_and_holds_no_source(chain: str, dtype: str) -> None:
    patterns, operations = CHAINS[chain]
    names = [(p, p.replace("*", str(i))) for i in range(3 if "*" in patterns[0] else 1) for p in patterns]
    torch.manual_seed(0)
    reader = MemoryReader({name: torch.randn(4, 6) for _, name in names})
    converter = WeightConverter(patterns, "a.merged", operations)
    step = NamingStep({"a.merged": ()}, tuple(names), converter)
    wanted = model_tensors._converted(Model(), step, reader=reader, dtype=getattr(torch, dtype))["a.merged"]
    reader.whole = 0
    step = NamingStep({"a.merged": tuple(wanted.shape)}, tuple(names), converter)
    ((name, made),) = build(Model(), step, reader=reader, dtypes={"a.merged": dtype}, fill=reader.fill)
    assert (name, made.dtype, made.is_contiguous()) == ("a.merged", wanted.dtype, True)
    assert torch.equal(made, wanted)
    assert reader.whole == 0


@pytest.mark.parametrize("stored", [(4, 6), (6, 4)], ids=["as it is", "transposed"])
def test_a_tensor_is_transposed_where_its_shape_asks_for_that(stored: tuple[int, int]) -> None:
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.empty(4, 6))})
    model.config = None
    reader = MemoryReader({"w": torch.randn(stored)})
    step = NamingStep({"w": (4, 6)}, (("w", "w"),), WeightConverter("w", "w", [Transpose(0, 1, check_dims=True)]))
    ((_, made),) = build(model, step, reader=reader, dtypes={"w": "float32"}, fill=reader.fill)
    assert torch.equal(made, model_tensors._converted(model, step, reader=reader, dtype=torch.float32)["w"])
    assert sources_in_order(step, reader.entries) == (("w",) if stored == (4, 6) else ())


def test_a_split_is_left_to_transformers() -> None:
    reader = MemoryReader({"a.qkv": torch.arange(12.0).view(6, 2)})
    converter = WeightConverter("a.qkv", ["a.q", "a.k", "a.v"], [Chunk(0)])
    step = NamingStep({f"a.{n}": (2, 2) for n in "qkv"}, (("a.qkv", "a.qkv"),), converter)
    dtypes = {"a.k": "float16", "a.v": "float32"}
    made = dict(build(Model(), step, reader=reader, dtypes=dtypes, fill=reader.fill))
    assert torch.equal(made["a.k"], torch.arange(4.0, 8.0).view(2, 2).half())
    assert torch.equal(made["a.v"], torch.arange(8.0, 12.0).view(2, 2))
