from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.checkpoint import open_checkpoint
from offstage.stages.checkpoints.codecs.mxfp4 import fold_mxfp4
from offstage.stages.checkpoints.codecs.scaled_codes import MXFP4, sample
from offstage.stages.checkpoints.packed import AtRest, PackedTensor
from offstage.stages.checkpoints.readers import read_extent

STACK = "model.layers.0.mlp.experts.gate_up_proj"
INTEGERS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def random_stack(experts: int, rows: int, groups: int) -> dict[str, torch.Tensor]:
    """Return the blocks and scales of a stack, of any bytes at all."""
    random = torch.Generator().manual_seed(experts * rows + groups)
    blocks = torch.randint(256, (experts, rows, groups, 16), generator=random, dtype=torch.uint8)
    scales = torch.randint(256, (experts, rows, groups), generator=random, dtype=torch.uint8)
    return {f"{STACK}_blocks": blocks, f"{STACK}_scales": scales}


def folded(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, AtRest]:
    save_file(tensors, folder / "model.safetensors")
    return fold_mxfp4(open_checkpoint(folder).entries, {"quant_method": "mxfp4"})


def packed(folder: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype = torch.bfloat16) -> PackedTensor:
    tensor = folded(folder, tensors)[STACK]
    assert isinstance(tensor, PackedTensor)
    return replace(tensor, dtype=str(dtype).removeprefix("torch."))


def unpacked_by_transformers(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return convert_moe_packed_tensors(tensors[f"{STACK}_blocks"], tensors[f"{STACK}_scales"], dtype=dtype)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    kind = INTEGERS[one.dtype]
    return one.dtype == other.dtype and torch.equal(one.view(kind), other.view(kind))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_every_byte_at_every_scale_is_what_transformers_makes_of_it(tmp_path: Path, dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    blocks = every.repeat(256, 1).reshape(1, 256, 16, 16)
    tensors = {f"{STACK}_blocks": blocks, f"{STACK}_scales": every[:, None].repeat(1, 16).reshape(1, 256, 16)}
    assert same_bits(read_extent(packed(tmp_path, tensors, dtype)), unpacked_by_transformers(tensors, dtype))


@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1), (3, 5, 2), (2, 96, 3), (1, 40_000, 1), (9, 1000, 25), (1, 3, 70_000)],
    ids=["one row", "odd", "small", "tall", "blocks that go over from expert to expert", "rows larger than a block"],
)
def test_stacks_of_any_shape_are_bit_for_bit_those_of_transformers(tmp_path: Path, shape: tuple[int, int, int]) -> None:
    tensors = random_stack(*shape)
    tensor = packed(tmp_path, tensors)
    assert tensor.rest_bytes == sum(part.numel() for part in tensors.values())
    assert same_bits(read_extent(tensor), unpacked_by_transformers(tensors, torch.bfloat16))


def test_an_expert_is_read_alone(tmp_path: Path) -> None:
    tensors = random_stack(4, 700, 90)
    whole, tensor = unpacked_by_transformers(tensors, torch.bfloat16), packed(tmp_path, tensors)
    for begin, end in ((0, 1), (3, 4), (1, 3)):
        part = tensor.codec.rows(tensor, begin, end)
        assert part is not None
        assert part.rest_bytes * 4 == tensor.rest_bytes * (end - begin)
        assert same_bits(read_extent(part), whole[begin:end])


def test_the_blocks_are_all_of_the_tensor_each_byte_once(tmp_path: Path) -> None:
    tensor = packed(tmp_path, random_stack(9, 1000, 25))
    blocks = tensor.codec.blocks(tensor)
    assert len(blocks) > 2
    assert sum(block.bytes for block in blocks) == tensor.rest_bytes
    assert max(block.end - block.begin for block in blocks) * tensor.shape[1] * 2 <= 4 * 2**20
    for part, spans in zip(tensor.parts, zip(*(block.spans for block in blocks), strict=True), strict=True):
        assert [span.begin for span in spans] == [part.begin, *(span.end for span in spans[:-1])]


def test_a_stack_without_experts_is_empty(tmp_path: Path) -> None:
    assert read_extent(packed(tmp_path, random_stack(0, 4, 2))).shape == (0, 64, 4)


def test_the_sample_is_a_block_that_can_be_unpacked() -> None:
    tensor, block, data = sample("mxfp4")
    target = torch.empty(tensor.shape, dtype=torch.bfloat16)
    tensor.codec.unpack(tensor, block, data, target.view(torch.uint8).flatten().numpy())
    blocks, scales = (torch.from_numpy(part).reshape(rest.shape) for part, rest in zip(data, tensor.parts, strict=True))
    assert same_bits(target, convert_moe_packed_tensors(blocks, scales))


def test_all_but_stacks_of_experts_stays_as_it_is(tmp_path: Path) -> None:
    plain = {f"{STACK}_bias": torch.ones(2, 8), "lm_head.weight": torch.ones(3, 3), "x_blocks": torch.ones(1)}
    entries = folded(tmp_path, random_stack(2, 8, 1) | plain)
    assert entries.keys() == {STACK, *plain}
    assert not any(isinstance(entries[name], PackedTensor) for name in plain)
    assert entries[STACK].shape == (2, 32, 8)
    assert entries[STACK].codec == MXFP4


BLOCKS, SCALES = random_stack(2, 8, 3).values()
REFUSED = {
    "blocks without scales": ({f"{STACK}_blocks": BLOCKS}, "has no .*_scales"),
    "scales without blocks": ({f"{STACK}_scales": SCALES}, "has no .*_blocks"),
    "scales of other experts": ({f"{STACK}_blocks": BLOCKS, f"{STACK}_scales": SCALES[:1]}, r"\[1, 8, 3\]"),
    "scales of fewer groups": ({f"{STACK}_blocks": BLOCKS, f"{STACK}_scales": SCALES[..., :2]}, r"\[2, 8, 2\]"),
    "scales that are floats": ({f"{STACK}_blocks": BLOCKS, f"{STACK}_scales": SCALES.float()}, "float32"),
    "blocks of another size": ({f"{STACK}_blocks": BLOCKS[..., :8], f"{STACK}_scales": SCALES}, r"3, 8\]"),
    "blocks that are flat": ({f"{STACK}_blocks": BLOCKS.flatten(1), f"{STACK}_scales": SCALES}, r"\[2, 384\]"),
    "blocks of signed bytes": ({f"{STACK}_blocks": BLOCKS.view(torch.int8), f"{STACK}_scales": SCALES}, "int8"),
    "a plain stack beside": ({**random_stack(2, 8, 3), STACK: torch.ones(1)}, "both in blocks and as it is"),
}


@pytest.mark.parametrize(("tensors", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_stack_is_refused_by_name(tmp_path: Path, tensors: dict[str, torch.Tensor], said: str) -> None:
    with pytest.raises(CheckpointError, match=said) as refusal:
        folded(tmp_path, {name: tensor.contiguous() for name, tensor in tensors.items()})
    assert STACK in str(refusal.value)
    assert "model.safetensors" in str(refusal.value)
    assert "\n" not in str(refusal.value)
