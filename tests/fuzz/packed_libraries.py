"""Weights of compressed-tensors, bitsandbytes, GPTQ and AWQ: unpacked or refused, within bounds.

What of a changed file is unpacked is held to nothing: the libraries aren't here to be asked.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save

from offstage.stages.checkpoints.checkpoint import open_checkpoint
from offstage.stages.checkpoints.packed import PackedTensor
from offstage.stages.checkpoints.readers import open_reader, read_extent
from tests.fuzz.formats import ALONE, Format
from tests.fuzz.mutations import JSON, SAFETENSORS
from tests.stages.checkpoints.codecs import (
    test_bitsandbytes as four_bits,
    test_compressed_tensors as compressed,
    test_grouped as grouped,
)

SHAPE = (8, 64)


def _make_compressed(folder: Path, *, scheme: str) -> None:
    torch.manual_seed(0)
    form, weights = compressed.SCHEMES[scheme]
    tensors = compressed.packed(form, weights, torch.bfloat16, SHAPE)
    config = {"model_type": "llama", "quantization_config": compressed.declared(form, weights)}
    folder.joinpath("config.json").write_text(json.dumps(config))
    named = {f"{compressed.MODULE}.{name}": tensor for name, tensor in tensors.items()}
    folder.joinpath("model.safetensors").write_bytes(save(named))


def _make_integers(folder: Path) -> None:
    _make_compressed(folder, scheme="INT4 by groups")


def _make_nvfp4(folder: Path) -> None:
    _make_compressed(folder, scheme="NVFP4")


def _make_nf4(folder: Path) -> None:
    torch.manual_seed(0)
    config = {"model_type": "llama", "quantization_config": four_bits.QUANTIZATION}
    folder.joinpath("config.json").write_text(json.dumps(config))
    named = {f"{four_bits.NAME}{part}": tensor for part, tensor in four_bits.packed(SHAPE).items()}
    folder.joinpath("model.safetensors").write_bytes(save(named))


def _make_grouped(folder: Path, *, kind: str) -> None:
    config = {"model_type": "llama", "quantization_config": dict(grouped.KINDS[kind])}
    folder.joinpath("config.json").write_text(json.dumps(config))
    parts, _ = grouped.packed(grouped.KINDS[kind], (32, 64))
    named = {f"{grouped.MODULE}.{part}": tensor for part, tensor in parts.items()}
    folder.joinpath("model.safetensors").write_bytes(save(named))


def _make_gptq(folder: Path) -> None:
    _make_grouped(folder, kind="GPTQ of 3 bits, reordered")


def _make_awq(folder: Path) -> None:
    _make_grouped(folder, kind="AWQ")


def _attempt(folder: Path, _pristine: Path) -> str:
    reader = open_reader(open_checkpoint(folder))
    for name, entry in reader.entries.items():
        if isinstance(entry, PackedTensor):
            read_extent(entry)
        else:
            reader.borrow(name)
    return ALONE


_weights = partial(Format, targets=("*.safetensors",), mutations=SAFETENSORS, attempt=_attempt)
_config = partial(Format, targets=("config.json",), mutations=JSON, attempt=_attempt)
FORMATS = (
    _weights("compressed int4", _make_integers),
    _config("compressed config", _make_integers),
    _weights("compressed nvfp4", _make_nvfp4),
    _weights("bitsandbytes", _make_nf4),
    _config("bitsandbytes config", _make_nf4),
    _weights("gptq", _make_gptq),
    _config("gptq config", _make_gptq),
    _weights("awq", _make_awq),
    _config("awq config", _make_awq),
)
