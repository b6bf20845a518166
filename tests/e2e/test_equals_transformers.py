"""Every way of decoding, on streamed models of many architectures: the token ids of transformers' own generate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Gemma2Config,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2MoeConfig,
    T5Config,
)

from offstage.pipeline.runner import check_config
from offstage.pipeline.stage_chain import StageChain
from tests.e2e.pipelines import STAGES, config_for
from tests.e2e.test_architectures import CONFIGS, ENDS, SIZES, WORDS
from tests.long_form import in_ci

pytestmark = pytest.mark.long_form
"""What it shows of whole runs, tests of the stages show of these."""

MODELS: dict[str, PretrainedConfig] = {
    **CONFIGS,
    "gemma2": Gemma2Config(
        **SIZES, **ENDS, vocab_size=WORDS, num_key_value_heads=2, head_dim=8, sliding_window=4,
        max_position_embeddings=64,
    ),
    "mixtral": MixtralConfig(**SIZES, **ENDS, vocab_size=WORDS, num_key_value_heads=2, num_local_experts=4),
    "qwen2_moe": Qwen2MoeConfig(
        **SIZES, **ENDS, vocab_size=WORDS, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, shared_expert_intermediate_size=24,
    ),
    "t5": T5Config(
        d_model=32, d_ff=48, num_layers=2, num_heads=4, d_kv=8, vocab_size=WORDS, decoder_start_token_id=0,
        pad_token_id=0, eos_token_id=2,
    ),
}  # fmt: skip
PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16, 17]]
"""Of unequal lengths: each has the answer that it has alone, whatever others it shares a pass with."""
TOKENS = 12

TOGETHER: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "several beams": {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.3, "early_stopping": True},
    "a repetition penalty": {"repetition_penalty": 1.8},
    "no pairs twice": {"no_repeat_ngram_size": 2, "min_new_tokens": 4},
    "words ruled out": {"bad_words_ids": [[40], [41, 42]], "suppress_tokens": list(range(50, 60))},
}
ALONE: dict[str, dict[str, Any]] = {
    "sampling": {"do_sample": True, "seed": 5},
    "sampling of few": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 6},
    "several samples": {"do_sample": True, "num_return_sequences": 3, "temperature": 1.3, "seed": 7},
    "sampled beams": {"do_sample": True, "num_beams": 3, "seed": 8},
    "lookup": {"prompt_lookup_num_tokens": 2},
}


@pytest.fixture(scope="module", params=in_ci("gemma2", of=MODELS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint with random weights, and a tokenizer of one letter a token."""
    folder = tmp_path_factory.mktemp("checkpoint") / request.param
    save_random(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:WORDS]
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def save_random(folder: Path) -> None:
    """Write a checkpoint with random weights, biases included, of the architecture that ``folder`` is named after."""
    torch.manual_seed(7)
    model = auto(folder).from_config(MODELS[folder.name], dtype=torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() > 1 else 0.1)
    model.save_pretrained(folder, max_shard_size="40KB")


def auto(folder: Path) -> Any:
    return AutoModelForSeq2SeqLM if folder.name == "t5" else AutoModelForCausalLM


def generated(checkpoint: Path, outputs: Path, prompts: Sequence[Mapping[str, Any]]) -> list[list[list[int]]]:
    """Return the tokens of each sequence that the pipeline answers each prompt with, every weight on disk."""
    config = config_for(
        checkpoint, outputs, device_map="disk", max_memory={"cpu": "1GB"}, storage={"io": "direct"},
        stages=[*STAGES, "generate"], generate={"prompts": list(prompts), "max_new_tokens": TOKENS},
    )  # fmt: skip
    chain = StageChain(check_config(config), config, cache=outputs / "cache")
    for stage in chain.stages:
        chain.obtain(stage)
    content = chain.artifact("generate").json("generation.json")
    assert content["metrics"]["streamed_bytes_per_token"] > 0, "nothing is streamed"
    chain.release()
    rows = iter(content["outputs"])
    return [[next(rows)["token_ids"] for _ in range(prompt.get("num_return_sequences", 1))] for prompt in prompts]


def reference(model: Any, prompt: Sequence[int], options: Mapping[str, Any], tokenizer: Any = None) -> list[list[int]]:
    """Return the tokens of each sequence that transformers' own generate answers ``prompt`` with."""
    given = {name: value for name, value in options.items() if name != "seed"}
    if "stop_strings" in given:
        given["tokenizer"] = tokenizer
    torch.manual_seed(options.get("seed", 0))
    output = model.generate(
        input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=TOKENS, **{"do_sample": False, **given},
    )  # fmt: skip
    begin = 1 if model.config.is_encoder_decoder else len(prompt)
    return [cut(row[begin:].tolist(), filled="stop_strings" in options) for row in output]


def cut(row: list[int], *, filled: bool) -> list[int]:
    """Return ``row`` to its end token, or without the padding after a stop string: that fills up the batch."""
    row = row[: row.index(2) + 1] if 2 in row else row
    while filled and row[-1] == 0:
        row = row[:-1]
    return row


def test_what_is_generated_is_what_transformers_generates(checkpoint: Path, tmp_path: Path) -> None:
    plain = auto(checkpoint).from_pretrained(checkpoint)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    greedy = reference(plain, PROMPTS[0], {})[0]
    text = tokenizer.decode(greedy)
    together = {**TOGETHER, "stop strings": {"stop_strings": [text[4:6], "never said"]}}
    cases = [(name, options, PROMPTS) for name, options in together.items()]
    cases += [(name, options, PROMPTS[:1]) for name, options in ALONE.items()]
    expected = {
        name: [reference(plain, prompt, options, tokenizer) for prompt in prompts] for name, options, prompts in cases
    }
    asked = [{"token_ids": prompt, **options} for _, options, prompts in cases for prompt in prompts]
    rows = iter(generated(checkpoint, tmp_path, asked))
    assert {name: [next(rows) for _ in prompts] for name, _, prompts in cases} == expected
    assert len(expected["stop strings"][0][0]) < len(greedy), "nothing was stopped"
