"""A small gpt-oss whose experts rest in MXFP4, as the published ones do."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, Mxfp4Config, PreTrainedModel

from tests.packed_references import without_asking_for_accelerate

QUANTIZATION = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
    "quant_method": "mxfp4",
}  # fmt: skip
"""Word for word what the published configs say."""

CONFIG = GptOssConfig(
    hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, vocab_size=96, pad_token_id=0, eos_token_id=1, num_local_experts=8, num_experts_per_tok=2,
    sliding_window=8, dtype="bfloat16",
)  # fmt: skip


def pack(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return ``weights`` with random blocks and scales of the same size in the place of each stack of experts."""
    random = torch.Generator().manual_seed(0)
    packed: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            packed[name] = weight
            continue
        experts, columns, rows = weight.shape
        shape = (experts, rows, columns // 32, 16)
        packed[f"{name}_blocks"] = torch.randint(256, shape, generator=random, dtype=torch.uint8)
        packed[f"{name}_scales"] = torch.randint(118, 122, shape[:3], generator=random, dtype=torch.uint8)
    return packed


def save_packed_mixture(folder: Path, *, quantization: Mapping[str, Any] = QUANTIZATION) -> Path:
    """Write the checkpoint into ``folder`` and return that."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16).save_pretrained(folder)
    weights = folder / "model.safetensors"
    save_file(pack(load_file(weights)), weights, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return folder


def unpacked_by_transformers(folder: Path, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """Return the model of the checkpoint in memory, unpacked as a whole.

    All weights in ``dtype``: transformers 5.17 leaves the experts in bfloat16, whatever it is asked for.
    """
    settings = Mxfp4Config(dequantize=True)
    with without_asking_for_accelerate():
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings, dtype=dtype).eval()
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    return model
