"""A plain checkpoint, and the same model as a maker would have written it in Q8_0 or FP8: by other code than ours."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from offstage.stages.checkpoints.codecs.ggml_formats import FORMATS
from offstage.stages.checkpoints.codecs.ggml_packing import PACK
from tests.e2e.fp8_checkpoints import rewrite
from tests.stages.checkpoints.ggufs import write_gguf

SIZES: Mapping[str, int] = {
    "vocab_size": 320, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
MIXTURE: Mapping[str, int] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 768}
CONFIGS: Mapping[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2),
    "qwen2": Qwen2Config(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=32),
    "qwen3moe": Qwen3MoeConfig(**SIZES, **MIXTURE, num_key_value_heads=2, head_dim=32, norm_topk_prob=True),
    "deepseek_v3": DeepseekV3Config(
        **SIZES, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
        first_k_dense_replace=1, n_group=2, topk_group=2, kv_lora_rank=32, q_lora_rank=32, qk_rope_head_dim=16,
        qk_nope_head_dim=16, v_head_dim=32,
    ),
}  # fmt: skip
BLOCK = 128
NARROW = {"q8_0": "q8_0", "q6_k": "q8_0", "q5_k": "q5_1", "q4_k": "q4_1"}
"""What rows are stored in that are no whole runs of 256 values."""


def save_plain(folder: Path, name: str, *, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Path:
    """Write the model ``name`` of ``CONFIGS``, of random weights, in files of 150 kB at most."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15 if parameter.dim() > 1 else 0.1)
    model.save_pretrained(folder, **{"max_shard_size": "150kB", **options})
    return folder


def plain_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def is_quantised(name: str) -> bool:
    """Return whether makers quantise what a checkpoint calls ``name``, in the models of ``CONFIGS``."""
    return "_proj" in name and name.endswith("weight") and ".layers." in name


def save_fp8_twin(folder: Path, source: Path) -> Path:
    """Write the checkpoint ``source`` in FP8 by blocks of 128 x 128."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    made: dict[str, torch.Tensor] = {}
    for name, tensor in plain_tensors(source).items():
        made |= _fp8(name, tensor) if is_quantised(name) else {name: tensor}
    rewrite(folder, made, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]})
    return folder


def _fp8(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    values, codes = tensor.float(), torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
    rows, columns = (range(0, size, BLOCK) for size in tensor.shape)
    scales = torch.empty(len(rows), len(columns))
    for top in rows:
        for left in columns:
            place = slice(top, top + BLOCK), slice(left, left + BLOCK)
            scale = values[place].abs().max() / 448
            scales[top // BLOCK, left // BLOCK] = scale
            codes[place] = (values[place] / scale).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": scales}


def save_gguf_twin(path: Path, source: Path, name: str, kind: str = "q8_0") -> Path:
    """Write the checkpoint ``source`` of the model ``name`` as a GGUF file in the format ``kind``.

    The ``gguf`` package quantises to Q8_0, and to nothing else that ``model.quantize`` does.
    """
    return Path(write_gguf(path, name, CONFIGS[name], _gguf_tensors(name, source, kind), tokens=320))


def _gguf_tensors(name: str, source: Path, kind: str) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield the file's names of tensors, their kinds, and their values, or their blocks."""
    import gguf

    config: Any = CONFIGS[name]
    arch = next(key for key, arch_name in gguf.MODEL_ARCH_NAMES.items() if arch_name == name)
    named = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    experts: dict[str, list[np.ndarray]] = {}
    for own, tensor in plain_tensors(source).items():
        values, (bare, _, suffix) = tensor.float().numpy(), own.rpartition(".")
        if ".experts." in bare:
            layer, which = bare.split(".")[2], bare.rpartition(".")[2].removesuffix("_proj")
            experts.setdefault(f"blk.{layer}.ffn_{which}_exps.weight", []).append(values)
            continue
        if name == "llama" and bare.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if bare.endswith("q_proj") else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        gguf_name = f"{named.get_name(bare)}.{suffix}"
        if is_quantised(own):
            yield gguf_name, *_blocks(values, kind)
        else:
            yield gguf_name, "bf16" if values.ndim > 1 else "f32", values
    for gguf_name, stack in experts.items():
        yield gguf_name, *_blocks(np.stack(stack), kind)


def _blocks(values: np.ndarray, kind: str) -> tuple[str, np.ndarray]:
    """Return in which format ``values`` are stored, and them, or their blocks."""
    own = kind if values.shape[-1] % FORMATS[kind].elements == 0 else NARROW[kind]
    if own == "q8_0":
        return own, values
    blocks = PACK[own](torch.from_numpy(values).clone().view(-1, FORMATS[own].elements))
    return own, blocks.view(*values.shape[:-1], -1).numpy()
