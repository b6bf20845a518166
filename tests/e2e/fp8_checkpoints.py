"""Small checkpoints in FP8, written by transformers' own quantiser, and the model that transformers dequantises."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    FineGrainedFP8Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from tests.e2e.test_architectures import ENDS, SIZES, WORDS
from tests.packed_references import without_asking_for_accelerate

BLOCK = (16, 16)
PLAIN = ("embed_tokens", "lm_head", "norm", ".gate.weight", "bias")
"""What makers leave as it is."""

QWEN = {**SIZES, **ENDS, "vocab_size": WORDS, "num_key_value_heads": 2, "head_dim": 8}
CONFIGS: Mapping[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, **ENDS, vocab_size=WORDS, num_key_value_heads=2),
    "qwen3": Qwen3Config(**QWEN, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(**QWEN, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "deepseek_v3": DeepseekV3Config(
        **SIZES, **ENDS, vocab_size=WORDS, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, first_k_dense_replace=1, n_group=2, topk_group=2, kv_lora_rank=16, q_lora_rank=16,
        qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16,
    ),
}  # fmt: skip


def save_fp8(folder: Path, config: PretrainedConfig, *, block: tuple[int, int] | None = BLOCK, **settings: Any) -> Path:
    """Write a checkpoint of ``config`` with random weights to ``folder``, quantised; its scales lie in another file."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() > 1 else 0.1)
    model.save_pretrained(folder)
    declared = FineGrainedFP8Config(weight_block_size=block, **settings)
    quantiser = Fp8Quantize(SimpleNamespace(quantization_config=declared))
    plain = load_file(folder / "model.safetensors")
    folder.joinpath("model.safetensors").unlink()
    quantised = [
        {name: tensor} if any(part in name for part in PLAIN) else quantiser.convert({name: tensor})
        for name, tensor in plain.items()
    ]
    rewrite(folder, {name: tensor for group in quantised for name, tensor in group.items()}, declared.to_dict())
    return folder


def rewrite(folder: Path, tensors: Mapping[str, torch.Tensor], quantization: Mapping[str, Any]) -> None:
    """Write ``tensors`` as the weights in ``folder``, and ``quantization`` into its config."""
    shards = {"weights.safetensors": False, "scales.safetensors": True}
    for shard, scales in shards.items():
        chosen = {name: tensor for name, tensor in tensors.items() if ("scale" in name) == scales}
        if chosen:
            save_file(chosen, folder / shard)
    index = {name: list(shards)["scale" in name] for name in tensors}
    folder.joinpath("model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config = json.loads(folder.joinpath("config.json").read_text())
    config["quantization_config"] = dict(quantization)
    folder.joinpath("config.json").write_text(json.dumps(config))


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors at rest of the checkpoint ``folder``, by name."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def dequantised(folder: Path, **options: Any) -> Any:
    """Return the model in memory that transformers dequantises."""
    config = FineGrainedFP8Config(dequantize=True)
    with without_asking_for_accelerate():
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, **options).eval()


def save_twin(folder: Path, source: Path) -> Path:
    """Write what transformers dequantises of the checkpoint ``source`` to ``folder``, as a plain checkpoint."""
    folder.mkdir()
    tensors = {name: tensor.contiguous() for name, tensor in dequantised(source).state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads(source.joinpath("config.json").read_text())
    del config["quantization_config"]
    folder.joinpath("config.json").write_text(json.dumps(config))
    return folder
