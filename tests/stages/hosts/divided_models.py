"""Run as each of several hosts: small models of many kinds, divided among all, asked what one process is asked.

``main`` with the arguments ``FOLDER NAME…`` leaves ``NAME-RANK.json`` in the folder: for each way to generate whether
the tokens and the logits are those of the whole model, to the bit; whether the rank's tensors are those of its share of
the skeleton; the bytes of tensors that it sent; and by what forwards are refused that ask for hidden states.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BloomConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    GPT2Config,
    JambaConfig,
    Lfm2Config,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MixtralConfig,
    OPTConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    T5Config,
    cache_utils,
)

from offstage.pipeline.errors import ConfigError
from offstage.pipeline.peers import peers
from offstage.stages.empty_init.describe import describe
from offstage.stages.empty_init.identity import MODEL_KEYS
from offstage.stages.empty_init.model import build_model
from offstage.stages.hosts.partition import chain_of, partition_of, share
from offstage.stages.hosts.stand_ins import stand_in
from offstage.stages.hosts.wire import Wire

_SMALL = {"vocab_size": 200, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
_SIZES = {**_SMALL, "num_hidden_layers": 6}
_HEADS = {**_SIZES, "num_key_value_heads": 2}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**_HEADS),
    "tied": lambda: LlamaConfig(**_HEADS, tie_word_embeddings=True),
    "gemma2": lambda: Gemma2Config(**_HEADS, head_dim=16, sliding_window=8),
    "mixtral": lambda: MixtralConfig(**_HEADS, num_local_experts=4),
    "t5": lambda: T5Config(
        vocab_size=200, d_model=32, d_kv=16, d_ff=64, num_layers=4, num_heads=4, decoder_start_token_id=1
    ),
    "mamba": lambda: MambaConfig(vocab_size=200, hidden_size=32, num_hidden_layers=6),
    "deepseek_v3": lambda: DeepseekV3Config(
        **_SIZES, num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1,
        first_k_dense_replace=2, moe_intermediate_size=32, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=16,
    ),
    "qwen3_next": lambda: Qwen3NextConfig(
        **_HEADS, **_MOE, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=16, shared_expert_intermediate_size=32,
    ),
    "lfm2": lambda: Lfm2Config(
        **_HEADS, layer_types=["conv", "full_attention"] * 3, conv_dim=32, block_dim=32, block_ff_dim=64
    ),
    "bart": lambda: BartConfig(
        vocab_size=200, d_model=32, encoder_layers=4, decoder_layers=4, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=128,
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=200, n_embd=32, n_layer=6, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2
    ),
    "opt": lambda: OPTConfig(**_SIZES, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=128),
    "bloom": lambda: BloomConfig(vocab_size=200, hidden_size=32, n_layer=6, n_head=4),
    "falcon": lambda: FalconConfig(vocab_size=200, hidden_size=32, num_hidden_layers=6, num_attention_heads=4),
    "qwen3_moe": lambda: Qwen3MoeConfig(**_HEADS, **_MOE, head_dim=16),
    "jamba": lambda: JambaConfig(**{**_HEADS, "num_hidden_layers": 8}, num_experts=2, use_mamba_kernels=False),
    "mamba2": lambda: Mamba2Config(
        vocab_size=200, hidden_size=32, num_hidden_layers=6, num_heads=8, head_dim=8, n_groups=2, state_size=8
    ),
}  # fmt: skip
_IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 3, 4, 5, 6, 7], [0, 0, 5, 4, 3, 2, 8, 9, 10, 11, 12, 13]])
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampled": {"do_sample": True},
    "prompt lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
}
if hasattr(cache_utils, "Fp8QuantizedLayer"):  # older ones quantise keys by packages that compile
    WAYS["cache in fp8"] = {
        "do_sample": False,
        "cache_implementation": "quantized",
        "cache_config": {"backend": "fp8"},
    }
_NEW = {"max_new_tokens": 12, "min_new_tokens": 12, "pad_token_id": 0}


def generated(model: Any, way: str) -> tuple[torch.Tensor, ...] | str:
    """Return the tokens and all logits; a refusal of transformers is as good an answer, where all hosts have it."""
    batch = (
        {"input_ids": _IDS, "attention_mask": (_IDS != 0).long()} if way != "prompt lookup" else {"input_ids": _IDS[:1]}
    )
    torch.manual_seed(7)
    try:
        output = model.generate(**batch, **_NEW, **WAYS[way], return_dict_in_generate=True, output_logits=True)
    except ValueError as error:
        return str(error)
    return (output.sequences, *output.logits)


def generated_by_way(model: Any) -> dict[str, tuple[torch.Tensor, ...] | str]:
    return {way: generated(model, way) for way in WAYS}


def is_same(first: tuple[torch.Tensor, ...] | str, second: tuple[torch.Tensor, ...] | str) -> bool:
    if isinstance(first, str) or isinstance(second, str):
        return first == second
    return len(first) == len(second) and all(map(torch.equal, first, second))


def refusals(model: Any) -> list[str]:
    """Return what forwards raise that ask for the hidden states of all blocks, by the call and by the model's config;
    nothing of one that raises nothing.
    """
    raised = []
    for asked in ({"output_hidden_states": True}, {}):
        model.config.output_hidden_states = not asked
        try:
            model(input_ids=_IDS, **asked)
        except ConfigError as error:
            raised.append(str(error))
    model.config.output_hidden_states = False
    return raised


def skeleton_of(config: Any, folder: Path, model_class: type) -> Any:
    config.architectures = [model_class.__name__]
    config.save_pretrained(folder)
    return describe(build_model({**MODEL_KEYS, "kind": "pretrained", "path": str(folder)}, "float32"))


def of_the_first(path: Path, make: Callable[[], Any]) -> Any:
    """Return what the first host makes, by way of a file: the others would only make the same again."""
    if torch.distributed.get_rank() == 0:
        torch.save(make(), path)
    torch.distributed.barrier()
    return torch.load(path, weights_only=False)


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")  # as a script may have done
    here = peers()
    for name in names:
        config = CONFIGS[name]()
        torch.manual_seed(1)
        kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        model = kind.from_config(config, dtype=torch.float32).eval()
        skeleton = of_the_first(folder / f"{name}.skeleton", partial(skeleton_of, config, folder / name, type(model)))
        chain = chain_of(skeleton)
        inner = random.Random(name).sample(range(1, chain.length), here.size - 1)
        partition = partition_of(chain, [0, *sorted(inner), chain.length])
        wanted = of_the_first(folder / f"{name}.wanted", partial(generated_by_way, model))
        stand_in(model, partition, Wire(here), here.rank)
        tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        share_names = {tensor.name for tensor in share(skeleton, partition.away(here.rank)).tensors}
        before = here.sent_bytes
        same = {way: is_same(wanted[way], generated) for way, generated in generated_by_way(model).items()}
        report = {
            "same": same,
            "tensors": {tensor_name for tensor_name, _ in tensors} == share_names,
            "sent_bytes": here.sent_bytes - before,
            "refusals": refusals(model),
            "cuts": {stack: list(cuts) for stack, cuts in partition.cuts.items()},
        }
        (folder / f"{name}-{here.rank}.json").write_text(json.dumps(report))
    here.close()
