"""GPTQ and AWQ: weights are unpacked by the formats' arithmetic, or refused by name.

No library that writes them is asked: the oracle is the arithmetic, written plainly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.checkpoint import open_checkpoint
from offstage.stages.checkpoints.codecs.grouped_integers import NAMES, sample
from offstage.stages.checkpoints.codecs.grouped_weights import fold_grouped
from offstage.stages.checkpoints.packed import PackedTensor, in_dtype
from offstage.stages.checkpoints.readers import read_extent
from offstage.stages.empty_init.identity import quantization_fault
from tests.long_form import in_turn

MODULE = "model.layers.0.mlp.up_proj"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
OF_EIGHT = (0, 2, 4, 6, 1, 3, 5, 7)
GPTQ: Mapping[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ: Mapping[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
KINDS: Mapping[str, Mapping[str, Any]] = {
    **{f"GPTQ of {bits} bits": {**GPTQ, "bits": bits, "checkpoint_format": "gptq_v2"} for bits in (2, 3, 4, 8)},
    "GPTQ, zeros less one": GPTQ,
    "GPTQ of 8 bits, zeros less one": {**GPTQ, "bits": 8},
    "GPTQ, groups of 128": {**GPTQ, "group_size": 128},
    "GPTQ, one group": {**GPTQ, "group_size": -1},
    "GPTQ, reordered": {**GPTQ, "desc_act": True},
    "GPTQ of 3 bits, reordered": {**GPTQ, "bits": 3, "desc_act": True, "checkpoint_format": "gptq_v2"},
    "AWQ": AWQ,
    "AWQ, groups of 128": {**AWQ, "group_size": 128},
}


def in_bits(values: np.ndarray, bits: int) -> torch.Tensor:
    """Return ``values`` [rows, count], one after the other in ``bits`` each, as rows of int32."""
    each = (values[..., None] >> np.arange(bits)) & 1
    data = np.packbits(each.reshape(len(values), -1).astype(np.uint8), axis=1, bitorder="little")
    return torch.from_numpy(np.ascontiguousarray(data).view(np.int32).copy())


def interleaved(values: np.ndarray) -> np.ndarray:
    return values.reshape(len(values), -1, 8)[..., OF_EIGHT].reshape(values.shape)


def packed(
    quantization: Mapping[str, Any], shape: tuple[int, int], *, dtype: torch.dtype = torch.float16, seed: int = 0
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return what a random weight rests as, by its parts' names, and what it is: both by the format's arithmetic."""
    chance = np.random.default_rng(seed)
    (outputs, inputs), bits = shape, quantization["bits"]
    group = inputs if quantization["group_size"] == -1 else quantization["group_size"]
    groups = -(-inputs // group)
    of = np.arange(inputs) // group
    if quantization.get("desc_act"):
        of = chance.permutation(of)
    codes = chance.integers(2**bits, size=(inputs, outputs))
    zeros = chance.integers(1, 2**bits, size=(groups, outputs))
    scales = torch.from_numpy(chance.random((groups, outputs)) * 0.02 + 0.001).to(dtype)
    weight = torch.from_numpy(codes - zeros[of]) * scales[torch.from_numpy(of)]
    if quantization["quant_method"] == "awq":
        parts = {"qweight": in_bits(interleaved(codes), 4), "qzeros": in_bits(interleaved(zeros), 4)}
    else:
        less = int(quantization.get("checkpoint_format", "gptq") == "gptq")
        parts = {"qweight": in_bits(codes.T, bits).T.contiguous(), "qzeros": in_bits(zeros - less, bits)}
        parts["g_idx"] = torch.from_numpy(of.astype(np.int32))
    return {**parts, "scales": scales}, weight.T.contiguous()


def folded(folder: Path, parts: Mapping[str, torch.Tensor], quantization: Mapping[str, Any]) -> PackedTensor:
    save_file({f"{MODULE}.{name}": part for name, part in parts.items()}, folder / "model.safetensors")
    entries = fold_grouped(open_checkpoint(folder).entries, quantization)
    (name,) = entries
    tensor = entries[name]
    assert name == f"{MODULE}.weight"
    assert isinstance(tensor, PackedTensor)
    return tensor


def quantise(model: nn.Module, quantization: Mapping[str, Any], folder: Path) -> nn.Module:
    """Write ``model`` with its layers' linear weights packed, in two shards; return it with what they mean."""
    folder.mkdir(parents=True)
    saved: dict[str, torch.Tensor] = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for number, (name, module) in enumerate(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            shape = tuple(module.weight.shape)
            parts, weight = packed(quantization, shape, dtype=module.weight.dtype, seed=number)
            del saved[f"{name}.weight"]
            saved |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
            module.weight = nn.Parameter(weight, requires_grad=False)
    names = list(saved)
    shards = names[: len(names) // 2], names[len(names) // 2 :]
    index = {}
    for at, shard in enumerate(shards, 1):
        file = f"model-0000{at}-of-00002.safetensors"
        save_file({name: saved[name].contiguous() for name in shard}, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config: Any = model.config
    fields = {**config.to_dict(), "quantization_config": dict(quantization)}
    (folder / "config.json").write_text(json.dumps(fields, default=str))
    return model


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize(("kind", "shape"), in_turn(KINDS, [(64, 128), (2080, 1056)]))
def test_weights_are_unpacked_by_the_formats_arithmetic(kind: str, shape: tuple[int, int], tmp_path: Path) -> None:
    for dtype in DTYPES:
        parts, weight = packed(KINDS[kind], shape, dtype=DTYPES[dtype])
        tensor = folded(tmp_path, parts, KINDS[kind])
        assert (tensor.dtype, tensor.shape) == (dtype, shape)
        assert (len(tensor.codec.blocks(tensor)) > 1) == (shape[0] > 64)
        for run in DTYPES:
            served = in_dtype(tensor, run)
            assert isinstance(served, PackedTensor)
            assert same_bits(read_extent(served), weight.to(DTYPES[run]))


def test_zeros_of_three_bits_that_rest_less_one_are_what_the_library_adds(tmp_path: Path) -> None:
    quantization = {**GPTQ, "bits": 3}
    parts, weight = packed({**quantization, "checkpoint_format": "gptq_v2"}, (64, 64))
    ones = np.array([0x24924924, 0x92492492, 0x49249249] * 2, np.uint32).view(np.int32)
    parts["qzeros"] -= torch.from_numpy(ones)
    assert same_bits(read_extent(folded(tmp_path, parts, quantization)), weight)


def test_inputs_in_order_need_no_groups_and_no_more_scales_than_theirs(tmp_path: Path) -> None:
    for quantization, count in ((GPTQ, 3), ({**GPTQ, "desc_act": True}, 4)):
        tensor = folded(tmp_path, packed(quantization, (2080, 1056))[0], quantization)
        assert len(tensor.parts) == count
        read = sum(block.bytes for block in tensor.codec.blocks(tensor))
        assert (read == tensor.rest_bytes) == (count == 3)


@pytest.mark.parametrize("name", NAMES)
def test_the_sample_is_a_block_that_can_be_unpacked(name: str) -> None:
    tensor, block, data = sample(name)
    target = torch.zeros(tensor.shape, dtype=torch.bfloat16)
    tensor.codec.unpack(tensor, block, data, target.view(torch.uint8).flatten().numpy())
    assert (target != 0).float().mean() > 0.5


GOOD = packed(GPTQ, (64, 128))[0]
BROKEN: Mapping[str, tuple[Mapping[str, torch.Tensor | None], str]] = {
    "no codes": ({"qweight": None}, "qweight', which isn't there"),
    "no zeros": ({"qzeros": None}, f"needs '{MODULE}.qzeros', which isn't there"),
    "no scales": ({"scales": None}, f"needs '{MODULE}.scales', which isn't there"),
    "codes of another dtype": ({"qweight": GOOD["qweight"].short()}, "qweight' is int16"),
    "codes in a line": ({"qweight": GOOD["qweight"].flatten()}, "int32 of two dimensions"),
    "codes of nothing": ({"qweight": GOOD["qweight"][:0]}, "int32 of two dimensions"),
    "an odd number of outputs": ({"qweight": GOOD["qweight"][:, :63].contiguous()}, "8 values of 4 bits together"),
    "fewer scales": ({"scales": GOOD["scales"][1:].contiguous()}, "[4, 64] belongs"),
    "scales that are integers": ({"scales": GOOD["scales"].int()}, "scales' is int32"),
    "zeros of another dtype": ({"qzeros": GOOD["qzeros"].float()}, "qzeros' is float32"),
    "fewer zeros": ({"qzeros": GOOD["qzeros"][:, 1:].contiguous()}, "int32 [4, 8] belongs"),
    "groups beyond the last": ({"g_idx": GOOD["g_idx"] + 1}, "has 1 to 4, where groups are 0 to 3"),
    "groups below the first": ({"g_idx": GOOD["g_idx"] - 1}, "has -1 to 2, where groups are 0 to 3"),
    "groups of fewer inputs": ({"g_idx": GOOD["g_idx"][:-1].contiguous()}, "int32 [128] belongs"),
    "a weight as it is too": ({"weight": torch.ones(2)}, "is there both quantised"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, case: str) -> None:
    changes, words = BROKEN[case]
    parts = {name: part for name, part in {**GOOD, **changes}.items() if part is not None}
    with pytest.raises(CheckpointError, match=re.escape(words)) as refusal:
        folded(tmp_path, parts, GPTQ)
    assert MODULE in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_reordered_inputs_need_their_groups(tmp_path: Path) -> None:
    parts = {name: part for name, part in GOOD.items() if name != "g_idx"}
    assert len(folded(tmp_path, parts, GPTQ).parts) == 3
    with pytest.raises(CheckpointError, match="desc_act needs"):
        folded(tmp_path, parts, {**GPTQ, "desc_act": True})


UNSERVED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "five bits": ({**GPTQ, "bits": 5}, "bits: 5"),
    "bits of a text": ({**GPTQ, "bits": "4"}, "bits: 4"),
    "groups of nothing": ({**GPTQ, "group_size": 0}, "group_size: 0"),
    "marlin": ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format: marlin"),
    "marlin as it once was said": ({**GPTQ, "is_marlin_format": True}, "is_marlin_format: True"),
    "other numbers": ({**GPTQ, "pack_dtype": "int16"}, "pack_dtype: int16"),
    "bits by module": ({**GPTQ, "dynamic": {r".*mlp.*": {"bits": 8}}}, "dynamic: "),
    "AWQ of eight bits": ({**AWQ, "bits": 8}, "bits: 8"),
    "gemv": ({**AWQ, "version": "gemv"}, "version: gemv"),
    "exllama": ({**AWQ, "version": "exllama"}, "version: exllama"),
    "no zeros": ({**AWQ, "zero_point": False}, "zero_point: False"),
    "llm-awq": ({**AWQ, "backend": "llm-awq"}, "backend: llm-awq"),
}


@pytest.mark.parametrize("case", UNSERVED)
def test_an_option_that_is_not_served_is_named_with_what_works(case: str, tmp_path: Path) -> None:
    quantization, words = UNSERVED[case]
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": dict(quantization)}))
    fault = str(quantization_fault(tmp_path))
    assert words in fault
    assert "served are" in fault
    for kind in KINDS.values():
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": dict(kind)}))
        assert quantization_fault(tmp_path) is None
