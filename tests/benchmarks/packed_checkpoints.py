"""Quantised checkpoints of real sizes: ``python -m tests.benchmarks.packed_checkpoints fp8|mxfp4|gguf SIZE FOLDER``.

Each has a twin that isn't packed: what transformers' own dequantising gives of it, in bfloat16. Both say the same
tokens then, and differ in nothing but the bytes at rest. They are written tensor by tensor, so that a checkpoint may be
larger than memory.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, GptOssConfig, Mxfp4Config
from transformers.integrations.finegrained_fp8 import Fp8Quantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from offstage.stages.empty_init import init_empty_weights
from tests.benchmarks.checkpoints import (
    INDEX,
    SHAPES,
    SPREAD,
    WORDS,
    Named,
    copy_beside,
    make,
    save_shards,
    tensors_of,
)
from tests.benchmarks.gguf_checkpoints import make_gguf, unpack_gguf
from tests.packed_references import unpacked_fp8

KINDS = ("fp8", "mxfp4", "gguf")
SCALE = "_scale_inv"
HEAD = "lm_head"
MXFP4_BLOCK = 32
"""The values that share a scale: two in a byte, sixteen bytes in a row."""
EXPERTS, CHOSEN = 32, 4


def make_fp8(source: Path, folder: Path, *, block: tuple[int, int] = (128, 128)) -> Path:
    """Write the checkpoint ``source`` in FP8 with a scale for each ``block`` into ``folder`` unless it is there.

    Transformers' own quantiser does it; embedding and head stay as they are. Returns the folder.
    """
    if (folder / INDEX).exists():
        return folder
    settings = FineGrainedFP8Config(weight_block_size=block, modules_to_not_convert=[HEAD])
    quantiser = Fp8Quantize(SimpleNamespace(quantization_config=settings))

    def quantised() -> Named:
        for name, tensor in tensors_of(source):
            kept = tensor.dim() < 2 or name.startswith((HEAD, "model.embed_tokens"))
            yield from ((name, tensor),) if kept else quantiser.convert({name: tensor}).items()

    _begin(source, folder, quantization_config=settings.to_dict())
    save_shards(quantised(), folder)
    return folder


def unpack_fp8(source: Path, folder: Path) -> Path:
    """Write what transformers unpacks the FP8 checkpoint ``source`` to into ``folder``; return that."""
    if (folder / INDEX).exists():
        return folder
    scales = dict(tensors_of(source, only=SCALE))

    def unpacked() -> Named:
        for name, tensor in tensors_of(source):
            if name + SCALE in scales:
                yield name, unpacked_fp8(tensor, scales[name + SCALE])
            elif name not in scales:
                yield name, tensor

    _begin(source, folder, quantization_config=None)
    save_shards(unpacked(), folder)
    return folder


def make_mxfp4(size: str, folder: Path) -> Path:
    """Write a mixture in the shape of gpt-oss with packed experts into ``folder`` unless it is there; return that.

    As wide as the Llama of ``size``, and unpacked of about its bytes. Codes are random, for transformers' quantiser
    runs on accelerators alone.
    """
    if (folder / INDEX).exists():
        return folder
    config = _gpt_oss(size)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    chance = torch.Generator().manual_seed(0)

    def packed() -> Named:
        for name, parameter in model.named_parameters():
            shape = tuple(parameter.shape)
            if name.endswith(("gate_up_proj", "down_proj")) and len(shape) == 3:
                yield from _codes(name, (shape[0], shape[2], shape[1]), chance)
            else:
                drawn = torch.randn(shape, generator=chance) * SPREAD if len(shape) > 1 else torch.ones(shape)
                yield name, drawn.bfloat16() if "bias" not in name else torch.zeros(shape, dtype=torch.bfloat16)

    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    _begin(folder, folder, quantization_config=Mxfp4Config(modules_to_not_convert=[HEAD]).to_dict())
    save_shards(packed(), folder)
    return folder


def unpack_mxfp4(source: Path, folder: Path) -> Path:
    """Write what transformers unpacks the MXFP4 checkpoint ``source`` to into ``folder``; return that."""
    if (folder / INDEX).exists():
        return folder
    scales = dict(tensors_of(source, only="_scales"))

    def unpacked() -> Named:
        for name, tensor in tensors_of(source):
            if name.endswith("_blocks"):
                stem = name.removesuffix("_blocks")
                yield stem, convert_moe_packed_tensors(tensor, scales[f"{stem}_scales"])
            elif name not in scales:
                yield name, tensor

    _begin(source, folder, quantization_config=None)
    save_shards(unpacked(), folder)
    return folder


def _begin(source: Path, folder: Path, *, quantization_config: dict[str, Any] | None) -> None:
    """Give ``folder`` the files of ``source`` beside its weights, with how those are quantised in its config."""
    copy_beside(source, folder)
    config = json.loads(folder.joinpath("config.json").read_text())
    config.pop("quantization_config", None)
    if quantization_config:
        config["quantization_config"] = quantization_config
    folder.joinpath("config.json").write_text(json.dumps(config, indent=1, default=str))


def _gpt_oss(size: str) -> GptOssConfig:
    """Return the config of a mixture as wide as the Llama of ``size``, with about as many values in its layers."""
    like = SHAPES[size]
    width = like["hidden_size"]
    inner = max(like["intermediate_size"] // 16 // MXFP4_BLOCK, 1) * MXFP4_BLOCK
    layers = max(round(like["num_hidden_layers"] * like["intermediate_size"] / (EXPERTS * inner)), 1)
    return GptOssConfig(
        vocab_size=WORDS, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, head_dim=64,
        num_attention_heads=width // 64, num_key_value_heads=width // 64, num_local_experts=EXPERTS,
        num_experts_per_tok=CHOSEN, tie_word_embeddings=False, bos_token_id=1, eos_token_id=None, pad_token_id=0,
        architectures=["GptOssForCausalLM"], dtype=torch.bfloat16,
    )  # fmt: skip


def _codes(name: str, shape: tuple[int, int, int], chance: torch.Generator) -> Named:
    """Yield the blocks and scales of a stack of experts, ``shape`` as they rest: experts, outputs, inputs."""
    experts, rows, columns = shape
    groups = columns // MXFP4_BLOCK
    blocks = (experts, rows, groups, MXFP4_BLOCK // 2)
    yield f"{name}_blocks", torch.randint(0, 256, blocks, generator=chance, dtype=torch.uint8)
    yield f"{name}_scales", torch.randint(118, 122, blocks[:3], generator=chance, dtype=torch.uint8)


def main() -> None:
    """Make one and its twin."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    make_pair(given.kind, given.size, given.folder)


def make_pair(kind: str, size: str, folder: Path) -> tuple[Path, Path]:
    """Return the packed checkpoint of ``kind`` and ``size`` in ``folder``, and its twin; made unless they are there.

    That of GGUF is a file.
    """
    packed, twin = folder / f"{size}-{kind}", folder / f"{size}-{kind}-unpacked"
    if kind == "gguf":
        source = make(size, folder / size)
        return make_gguf(source, packed), unpack_gguf(source, twin)
    if kind == "fp8":
        return make_fp8(make(size, folder / size), packed), unpack_fp8(packed, twin)
    return make_mxfp4(size, packed), unpack_mxfp4(packed, twin)


if __name__ == "__main__":
    main()
