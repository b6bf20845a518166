"""Checkpoints of real sizes with random weights: ``python -m tests.benchmarks.checkpoints SIZE FOLDER``.

Written tensor by tensor, so that a 13 GB checkpoint is made in a few hundred MB of memory.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from stages.empty_init import init_empty_weights

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 500 * 10**6
SPREAD = 0.02
SHAPES = {
    "0.1b": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12},
    "0.4b": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 16},
    "1.1b": {
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
    "3b": {"hidden_size": 3200, "intermediate_size": 8640, "num_hidden_layers": 26, "num_attention_heads": 32},
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
}  # fmt: skip


def make(size: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a Llama checkpoint of ``size`` into ``folder`` unless one is there; return the folder."""
    if (folder / INDEX).exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(
        **SHAPES[size], vocab_size=32_000, max_position_embeddings=2048, architectures=["LlamaForCausalLM"]
    )
    config.dtype = dtype
    config.save_pretrained(folder)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    write_shards(((name, parameter.shape, SPREAD) for name, parameter in model.named_parameters()), folder, dtype)
    return folder


def write_shards(tensors: Iterable[tuple[str, Sequence[int], float]], folder: Path, dtype: torch.dtype) -> None:
    """Write random ``tensors`` in shards into ``folder``, and in the end their index.

    They are given by name, shape and standard deviation; vectors are ones.
    """
    generator = torch.Generator().manual_seed(0)
    pending: dict[str, torch.Tensor] = {}
    weight_map: dict[str, str] = {}
    total = 0

    def flush() -> None:
        name = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        save_file(pending, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(pending, name))
        pending.clear()

    for name, shape, spread in tensors:
        noise = torch.randn(tuple(shape), generator=generator, dtype=torch.float32)
        tensor = (noise * spread if len(shape) > 1 else torch.ones(shape)).to(dtype)
        if sum(each.nbytes for each in pending.values()) + tensor.nbytes > SHARD_BYTES and pending:
            flush()
        pending[name] = tensor
        total += tensor.nbytes
    flush()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    folder.joinpath(INDEX).write_text(json.dumps(index, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    make(arguments.size, arguments.folder)
