"""Small models on disk, and what their decoding of a prompt comes to: plainly, or with guesses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BloomConfig,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    T5Config,
)

from offstage.stages.dispatch.loaded_model import LoadedModel, load
from offstage.stages.dispatch.streaming.streamer import streamer_of
from offstage.stages.generate.decode import Clock, decode_with_transformers
from offstage.stages.generate.judged import Judged
from offstage.stages.generate.logprobs import ChosenLogprobs
from offstage.stages.generate.sampling import SeededRows, seeded_rows
from offstage.stages.generate.speculation import ExactSpeculation

WORDS = 96
SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
ENDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
WINDOWS: dict[str, Any] = {
    "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
CONFIGS: Mapping[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2),
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=WORDS, n_positions=256, **ENDS),
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8),
    "mixtral": MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4),
    "gemma3": Gemma3TextConfig(**SIZES, **WINDOWS),
    "t5": T5Config(d_model=32, d_ff=48, num_layers=2, num_heads=4, d_kv=8, vocab_size=WORDS, decoder_start_token_id=0),
    "bloom": BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=WORDS, **ENDS),
    "gpt_oss": GptOssConfig(**SIZES, **WINDOWS, num_local_experts=4, num_experts_per_tok=2),
    "mistral": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=6),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, num_key_value_heads=2, head_dim=8, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16
    ),
}  # fmt: skip
SAMPLED = {"do_sample": True, "temperature": 0.4, "repetition_penalty": 1.1}


def save_model(folder: Path, name: str, dtype: torch.dtype) -> Any:
    """Write a checkpoint of random weights, large enough that its tokens differ; return the model."""
    torch.manual_seed(7)
    auto = AutoModelForSeq2SeqLM if name == "t5" else AutoModelForCausalLM
    model = auto.from_config(CONFIGS[name], dtype=dtype).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() > 1 else 0.1)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    model.save_pretrained(folder / "checkpoint")
    return model


def open_streamed(folder: Path, **options: Any) -> LoadedModel:
    """Return the checkpoint in ``folder`` dispatched, by default with every weight on disk."""
    on_disk = {"device_map": "disk", "storage": {"io": "direct"}}
    return load(folder / "checkpoint", cache=folder / "cache", **{**on_disk, **options})


@dataclass(frozen=True, slots=True)
class Answer:
    """The new tokens, the log-probability of each, and what came of guessing them."""

    tokens: list[int]
    scores: list[float | None]
    judged: Judged


def answer(
    model: Any, prompt: Sequence[int], *, new: int = 16, guesses: int = 0, free: float = 6.0, assistant: Any = None,
    **options: Any,
) -> Answer:  # fmt: skip
    """Return what ``model`` answers: with so many guesses at once, or plainly."""
    logprobs, judged, loop = ChosenLogprobs(), Judged(), None
    asked = {"max_new_tokens": new, "do_sample": False, **options}
    if guesses:
        speculation = ExactSpeculation(streamer_of(model), free=free, assistant=assistant, logprobs=logprobs)
        loop, judged = speculation.decode, speculation.judged
        asked |= {"prompt_lookup_num_tokens": guesses} if assistant is None else {}
    ids = torch.tensor([list(prompt)])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad(), SeededRows(model), seeded_rows([3]):
        tokens = decode_with_transformers(
            model, inputs, asked, device=torch.device("cpu"), clock=Clock(), logprobs=logprobs, loop=loop
        )[0].tolist()
    return Answer(tokens, logprobs.of(0, len(tokens)), judged)


def random_prompt(number: int) -> list[int]:
    """Return a prompt without repeats worth a word, each number's another."""
    draw = torch.Generator().manual_seed(number)
    return torch.randint(3, WORDS, (5 + number % 17,), generator=draw).tolist()


def edited_prompt(model: Any, number: int) -> list[int]:
    """Return a prompt with long repeats, to be answered with more: it has in it what ``model`` answered to its end."""
    plain = random_prompt(number)
    return plain + answer(model, plain).tokens + plain
