"""What a model's tensors rest in, from the headers of its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import nn
from transformers import LlamaConfig, Qwen3MoeConfig

from offstage.pipeline.decoding import decode
from offstage.stages.checkpoints.checkpoint import Checkpoint
from offstage.stages.checkpoints.codecs.planes import PlaneCodec
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.packed import SCRATCH_BYTES, AtRest
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.empty_init.describe import describe
from offstage.stages.empty_init.packing import with_packed
from offstage.stages.empty_init.skeleton import PackedSpec, Skeleton
from tests.stages.empty_init.test_experts import on_meta

FILE = ShardFile("model.safetensors", Path("model.safetensors"), 0, None, "")
SMALL = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "dtype": "bfloat16"}
LLAMA = LlamaConfig(**SMALL, num_attention_heads=2, num_key_value_heads=2)
MIXTURE = Qwen3MoeConfig(
    **SMALL, num_attention_heads=2, num_key_value_heads=2, head_dim=8, moe_intermediate_size=8, num_experts=4,
    num_experts_per_tok=2,
)  # fmt: skip


def packed(shape: tuple[int, ...]) -> AtRest:
    """Return a tensor of ``shape`` that rests in five bytes a row."""
    width = 1
    for size in shape[1:]:
        width *= size
    return PlaneCodec("bfloat16", width, ((2, 3),) * shape[0]).located(FILE, 0, shape)


def skeleton_of(model: nn.Module, entries: Mapping[str, AtRest]) -> Skeleton:
    checkpoint = Checkpoint(Path(), "safetensors", (FILE,), entries)  # type: ignore[arg-type]
    skeleton = describe(model, no_split=("Layer",), rehearsed=False)
    return with_packed(replace(skeleton, experts=describe(model).experts), model, checkpoint, adapted=False)


def test_a_tensor_that_the_checkpoint_has_packed_rests_so() -> None:
    model = on_meta(LLAMA).bfloat16()
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    entries = {
        name: packed(shape) if len(shape) == 2 else Extent(FILE, 0, "bfloat16", shape) for name, shape in shapes.items()
    }
    skeleton = skeleton_of(model, entries)
    packed_of = {spec.name: spec.packed for spec in skeleton.tensors if spec.packed}
    assert set(packed_of) == {name for name, shape in shapes.items() if len(shape) == 2}
    gate = packed_of["model.layers.0.mlp.gate_proj.weight"]
    assert (gate.codec, gate.bytes) == ("zstd", 5 * 24)
    assert gate.working_bytes > SCRATCH_BYTES
    wide = skeleton_of(on_meta(LLAMA).float(), entries)
    assert not any(spec.packed for spec in wide.tensors), "no codec unpacks it to that dtype"


def test_experts_that_rest_one_by_one_are_the_sum_of_them() -> None:
    model = on_meta(MIXTURE).bfloat16()
    experts = "model.layers.0.mlp.experts"
    entries: dict[str, AtRest] = {
        name: Extent(FILE, 0, "bfloat16", tuple(tensor.shape))
        for name, tensor in model.state_dict().items()
        if not name.startswith(experts)
    }
    for number in range(4):
        entries |= {f"{experts}.{number}.{part}_proj.weight": packed((8, 16)) for part in ("gate", "up")}
        entries |= {f"{experts}.{number}.down_proj.weight": packed((16, 8))}
    packed_of = {spec.name: spec.packed for spec in skeleton_of(model, entries).tensors if spec.packed}
    sizes = {name: spec.bytes for name, spec in packed_of.items()}
    assert sizes == {f"{experts}.gate_up_proj": 4 * 2 * 8 * 5, f"{experts}.down_proj": 4 * 16 * 5}


def test_a_saved_skeleton_says_what_its_tensors_rest_in(tmp_path: Path) -> None:
    model = on_meta(LLAMA).bfloat16()
    plain = describe(model, rehearsed=False)
    specs = tuple(replace(spec, packed=PackedSpec("half", 3, 7)) for spec in plain.tensors)
    replace(plain, tensors=specs).save(tmp_path)
    again = decode(Skeleton, json.loads(tmp_path.joinpath("skeleton.json").read_text()))
    assert again.tensors == specs
