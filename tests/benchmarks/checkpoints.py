"""Checkpoints of real sizes with random weights: ``python -m tests.benchmarks.checkpoints SIZE FOLDER``.

Written tensor by tensor, so that a 13 GB checkpoint is made in a few hundred MB of memory.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from offstage.stages.empty_init import init_empty_weights

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 500 * 10**6
SPREAD = 0.02
WORDS = 32_000
TEXT_SPREAD = 4.0
"""The standard deviation of embeddings in a model that goes on with a text: large beside what its layers add."""
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
_COMMON: dict[str, Any] = {
    "vocab_size": 8000, "num_attention_heads": 8, "num_key_value_heads": 4, "bos_token_id": 1, "eos_token_id": None,
    "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
Draw = Callable[[], torch.Tensor]
Named = Iterator[tuple[str, torch.Tensor]]

MIXTURES: dict[str, PretrainedConfig] = {
    "mixtral": MixtralConfig(
        **_COMMON, hidden_size=768, intermediate_size=1536, num_hidden_layers=4, num_local_experts=8,
        num_experts_per_tok=2,
    ),
    "qwen3-moe": Qwen3MoeConfig(
        **_COMMON, hidden_size=512, moe_intermediate_size=192, num_hidden_layers=6, num_experts=64,
        num_experts_per_tok=8, head_dim=64,
    ),
    "gpt-oss": GptOssConfig(
        **_COMMON, hidden_size=512, intermediate_size=512, num_hidden_layers=5, num_local_experts=32,
        num_experts_per_tok=4, head_dim=64,
    ),
}  # fmt: skip
"""Of about 250 MB each in bfloat16. A token uses two of 8 experts, 8 of 64, 4 of 32."""


def make_mixture_like(name: str, folder: Path) -> Path:
    """Write the mixture ``name`` of ``MIXTURES`` into ``folder`` unless one is there; return the folder.

    Tokens are spread widely and layers add little to them, so that each goes to other experts: routing is nearly
    uniform.
    """
    if (folder / "config.json").exists():
        return folder
    torch.manual_seed(0)
    config = MIXTURES[name]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_()
        for parameter_name, parameter in model.named_parameters():
            if "down_proj" in parameter_name or "o_proj" in parameter_name:
                parameter /= math.sqrt(2 * config.num_hidden_layers)
    model.save_pretrained(folder, max_shard_size="100MB")
    return folder


def make_copying(size: str, folder: Path, text: Sequence[int]) -> Path:
    """Write a Llama checkpoint of ``size`` that goes on with ``text``; return a folder beside ``folder``.

    Embeddings and head are arranged: each token of the text asks for the one after it, the last for the first; no other
    token is ever said. The weights of the layers are random as ever, and what they add is too little to change that.
    """
    generator = torch.Generator().manual_seed(1)
    shape = (WORDS, SHAPES[size]["hidden_size"])

    def words() -> torch.Tensor:
        return torch.randn(shape, generator=generator.manual_seed(1))

    def head() -> torch.Tensor:
        weight, after = torch.zeros(shape), [*text[1:], text[0]]
        weight[after] = words()[list(text)]
        return weight

    arranged = {"model.embed_tokens.weight": lambda: TEXT_SPREAD * words(), "lm_head.weight": head}
    return make(size, folder.with_name(f"{folder.name}-copying"), arranged=arranged)


def make(
    size: str, folder: Path, dtype: torch.dtype = torch.bfloat16, *, arranged: Mapping[str, Draw] | None = None
) -> Path:
    """Write a Llama checkpoint of ``size`` into ``folder`` unless one is there; return the folder.

    Tensors that are ``arranged`` are drawn by what stands there for them.
    """
    if (folder / INDEX).exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(
        **SHAPES[size], vocab_size=WORDS, max_position_embeddings=2048, architectures=["LlamaForCausalLM"]
    )
    config.dtype = dtype
    config.save_pretrained(folder)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    write_shards(
        ((name, parameter.shape, SPREAD) for name, parameter in model.named_parameters()),
        folder,
        dtype,
        arranged=arranged,
    )
    return folder


def write_shards(
    tensors: Iterable[tuple[str, Sequence[int], float]], folder: Path, dtype: torch.dtype, *,
    arranged: Mapping[str, Draw] | None = None,
) -> None:  # fmt: skip
    """Write random ``tensors`` in shards into ``folder``, and in the end their index.

    They are given by name, shape and standard deviation; vectors are ones, and those that are ``arranged`` what stands
    there for them. An accelerator draws them where there is one, which takes seconds instead of minutes.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)

    def drawn() -> Named:
        for name, shape, spread in tensors:
            noise = torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device=device)
            tensor = noise * spread if len(shape) > 1 else torch.ones(shape)
            yield name, (arranged[name]() if arranged and name in arranged else tensor).to("cpu", dtype)

    save_shards(drawn(), folder)


def save_shards(tensors: Iterable[tuple[str, torch.Tensor]], folder: Path) -> None:
    """Write ``tensors`` by their names in shards into ``folder``, one shard in memory at a time; last their index."""
    pending: dict[str, torch.Tensor] = {}
    weight_map: dict[str, str] = {}
    total = 0

    def flush() -> None:
        name = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        save_file(pending, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(pending, name))
        pending.clear()

    for name, tensor in tensors:
        if sum(each.nbytes for each in pending.values()) + tensor.nbytes > SHARD_BYTES and pending:
            flush()
        pending[name] = tensor
        total += tensor.nbytes
    flush()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    folder.joinpath(INDEX).write_text(json.dumps(index, indent=1))


def tensors_of(folder: Path, *, only: str = "") -> Named:
    """Yield the tensors of a checkpoint in shards, one by one; ``only`` those whose names end so."""
    weight_map = json.loads(folder.joinpath(INDEX).read_text())["weight_map"]
    for shard in sorted(set(weight_map.values())):
        with safe_open(folder / shard, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                if name.endswith(only):
                    yield name, opened.get_tensor(name)


def copy_beside(source: Path, folder: Path) -> None:
    """Make ``folder`` with the texts that lie beside the weights in ``source``."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.glob("*.json"):
        if file.name != INDEX and source != folder:
            shutil.copy(file, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    make(arguments.size, arguments.folder)
