"""Small models of many kinds of cache, and what one really keeps when it generates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PretrainedConfig

from offstage.stages.calls.results import kept_cache

WINDOW = 64
_SMALL = {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 100}
_HEADS = {**_SMALL, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_ALL_HEADS = {name: size for name, size in {**_HEADS, "num_key_value_heads": 4}.items() if name != "head_dim"}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
_LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
_STATE = {**_SMALL, "state_size": 8}
_MIXERS = {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1}
_HALVES = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4, "encoder_ffn_dim": 96,
    "decoder_attention_heads": 4, "decoder_ffn_dim": 96, "vocab_size": 100,
}  # fmt: skip
_HEARD = {
    "num_mel_bins": 16, "max_source_positions": 150, "max_target_positions": 256, "pad_token_id": 0, "eos_token_id": 2,
    "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip
_PLAIN = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100, "num_hidden_layers": 3}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _HEADS,
    "mistral": {**_HEADS, "sliding_window": WINDOW},
    "gemma2": {**_HEADS, "sliding_window": WINDOW},
    "gemma3_text": {**_HEADS, "num_hidden_layers": 9, "sliding_window": WINDOW},
    "qwen3": {**_HEADS, "head_dim": 32},
    "mixtral": {**_HEADS, **_EXPERTS},
    "deepseek_v2": {**_ALL_HEADS, **_LATENT},
    "deepseek_v3": {**_ALL_HEADS, **_LATENT},
    "gpt_oss": {**_HEADS, **_EXPERTS, "sliding_window": WINDOW},
    "llama4_text": {**_HEADS, "num_local_experts": 4, "intermediate_size_mlp": 96, "attention_chunk_size": WINDOW},
    "mamba": _STATE,
    "mamba2": {**_STATE, "num_heads": 8, "head_dim": 16, "n_groups": 1},
    "falcon_mamba": _STATE,
    "recurrent_gemma": {**_HEADS, "attention_window_size": WINDOW, "lru_width": 64},
    "jamba": {**_HEADS, "num_hidden_layers": 6, "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False,
              "num_experts": 4, "num_experts_per_tok": 2},
    "bamba": {**_HEADS, **_MIXERS, "attn_layer_indices": [1]},
    "rwkv": {**_SMALL, "attention_hidden_size": 64, "context_length": 1024},
    "minimax": {**_HEADS, "num_local_experts": 4, "block_size": 64},
    "qwen3_next": {**_HEADS, **_LINEAR},
    "lfm2": {**_HEADS, "layer_types": ["conv", "conv", "full_attention", "conv"]},
    "falcon": {**_PLAIN, "multi_query": True},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 100},
    "opt": {**_PLAIN, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "bloom": {"hidden_size": 64, "n_layer": 3, "n_head": 4, "vocab_size": 100},
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 3, "num_heads": 4, "vocab_size": 100,
           "decoder_start_token_id": 0},
    "bart": {**_HALVES, "max_position_embeddings": 1024},
    "whisper": {**_HALVES, **_HEARD},
}  # fmt: skip


def config_of(name: str) -> PretrainedConfig:
    return CONFIG_MAPPING[name](**CONFIGS[name])  # type: ignore[no-any-return]


def build(name: str) -> nn.Module:
    config = config_of(name)
    halves = {"whisper": transformers.AutoModelForSpeechSeq2Seq}
    plain = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    return halves.get(name, plain).from_config(config).eval()  # type: ignore[no-any-return]


def inputs_of(name: str, *, sequences: int, length: int) -> dict[str, torch.Tensor]:
    if name == "whisper":
        return {"input_features": torch.rand(sequences, 16, 300)}
    ids = torch.randint(3, 99, (sequences, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class Kept(NamedTuple):
    """The bytes that a model keeps: of storages after its first forward, and in the end; then of tensors."""

    prompted: int
    finished: int
    tensors: int


def kept_bytes(model: Any, given: Mapping[str, torch.Tensor], *, new: int, beams: int) -> Kept:
    """Return what ``model`` keeps of so many ``new`` tokens: the last of them never goes through it."""
    sizes: list[tuple[int, int]] = []

    def note(module: nn.Module, _args: Any, kwargs: Any, output: Any) -> None:
        caches = [*kept_cache(kwargs).values(), *kept_cache(output).values()]
        tensors = list(tensors_of([caches, *(vars(part) for part in module.modules())], set()))
        storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}
        sizes.append((sum(storages.values()), sum(one.nbytes for one in tensors)))

    model.generation_config.eos_token_id = None
    handle = model.register_forward_hook(note, with_kwargs=True)
    with torch.no_grad():
        model.generate(**given, max_new_tokens=new, min_new_tokens=new, num_beams=beams, do_sample=False)
    handle.remove()
    return Kept(sizes[0][0], *sizes[-1])


def tensors_of(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Yield the tensors in ``value`` that no module registers, each once; numbers are none."""
    if id(value) in seen or isinstance(value, (nn.Module, nn.Parameter, type, PretrainedConfig)):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        if value.dim():
            yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            if name not in ("_parameters", "_buffers", "_modules"):
                yield from tensors_of(inner, seen)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from tensors_of(inner, seen)
    elif "cache" in type(value).__module__ or "Cache" in type(value).__name__:
        yield from tensors_of(vars(value), seen)
