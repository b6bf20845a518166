"""Small models of many kinds, and prompts that go through them in lockstep under settings that are drawn at random."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    RecurrentGemmaConfig,
    T5Config,
)

from offstage.pipeline.errors import BudgetError
from offstage.stages.dispatch.loaded_model import LoadedModel, load
from offstage.stages.dispatch.streaming.streamer import streamer_of

WORDS = 96
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
         "vocab_size": WORDS}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}
CONFIGS: Mapping[str, PretrainedConfig] = {
    "llama": LlamaConfig(**GROUPED),
    "mixtral": MixtralConfig(**GROUPED, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(**GROUPED, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16),
    "mamba": MambaConfig(hidden_size=32, num_hidden_layers=3, vocab_size=WORDS, state_size=8),
    "t5": T5Config(
        d_model=32, d_ff=48, num_layers=2, num_heads=4, d_kv=8, vocab_size=WORDS, decoder_start_token_id=0
    ),
    "mistral, which slides": MistralConfig(**GROUPED, sliding_window=5),
    "gpt2": GPT2Config(n_embd=32, n_layer=3, n_head=4, n_positions=128, vocab_size=WORDS),
    "qwen3": Qwen3Config(**GROUPED, head_dim=8),
    "recurrent_gemma": RecurrentGemmaConfig(
        **{**SIZES, "intermediate_size": 96}, lru_width=32, attention_window_size=8
    ),
    "llama, dynamic rope": LlamaConfig(
        **GROUPED, max_position_embeddings=8, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    ),
}  # fmt: skip
RECURRENT = ("mamba", "recurrent_gemma")
"""Their scans are slow on the cpu, and beams take back what they have read."""
MIXTURES = ("mixtral", "qwen3_moe")
ON_DISK = {"device_map": "disk", "storage": {"io": "direct"}}
PLACES = ("disk", "least", "half", "simulated")
"""All on disk; all on disk with the smallest budget that works; some on the host, or on a simulated accelerator."""
MODES: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_p": 0.9},
    "beams": {"do_sample": False, "num_beams": 3},
}

Call = Callable[[], torch.Tensor]
Asked = list[tuple[torch.Tensor, int]]


@dataclass(frozen=True)
class Setting:
    """A model, where it lies, how many prompts go together, and by what their tokens are chosen."""

    name: str
    dtype: torch.dtype = torch.bfloat16
    place: str = "disk"
    mode: str = "greedy"
    size: int = 4
    lengths: tuple[tuple[int, int], ...] = ((3, 5), (9, 2), (1, 4), (6, 6), (2, 1), (4, 3))
    """Of each prompt the tokens that are given, and the new ones."""

    def asked(self) -> Asked:
        """Return the token ids of the prompts, and how many new ones follow each."""
        torch.manual_seed(11)
        return [(torch.randint(3, WORDS, (1, length)), new) for length, new in self.lengths]


def drawn(name: str, number: int, *, largest: int) -> Setting:
    """Return the setting ``number`` of the model ``name``; at most ``largest`` prompts go together."""
    draw = random.Random(f"{name} {number}")
    size = draw.randint(2, largest)
    count, longest = size + draw.randint(1, size), 6 if name in RECURRENT else 30
    return Setting(
        name,
        draw.choice([torch.float32, torch.bfloat16]),
        draw.choice(PLACES),
        draw.choice(["greedy", "sampled"] if name in RECURRENT else [*MODES]),
        size,
        tuple((draw.randint(1, longest), draw.randint(1, 8)) for _ in range(count)),
    )


def saved(folder: Path, name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Write a checkpoint of random weights, large enough that its tokens differ; return the model."""
    torch.manual_seed(7)
    auto = AutoModelForSeq2SeqLM if name == "t5" else AutoModelForCausalLM
    model = auto.from_config(CONFIGS[name], dtype=dtype).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    model.save_pretrained(folder)
    return model


def calls(model: Any, asked: Asked, **options: Any) -> list[Call]:
    """Return what generates the answer to each prompt."""
    options = {"do_sample": False, **options}
    return [partial(model.generate, ids, max_new_tokens=new, **options) for ids, new in asked]


def opened(folder: Path, **options: Any) -> LoadedModel:
    """Load the checkpoint that was ``saved``, on disk unless ``options`` say otherwise."""
    return load(folder / "checkpoint", cache=folder / "cache", max_length=64, **{**ON_DISK, **options})


def options_of(setting: Setting, folder: Path, whole: int) -> dict[str, Any]:
    """Return how the model of so many bytes is loaded; the smallest budget is the one that a refusal names."""
    least: dict[str, Any] = {**ON_DISK, "max_memory": {"cpu": 1}, "hardware": {"devices": []}}
    if setting.place == "least":
        with pytest.raises(BudgetError) as refusal:
            opened(folder, **least)
        (budget,) = re.findall(r"the least that works is (\d+) bytes", str(refusal.value))
        return {**least, "max_memory": {"cpu": int(budget)}}
    if setting.place == "half":
        return {**least, "device_map": "optimal", "max_memory": {"cpu": whole // 2}}
    if setting.place == "simulated":
        device = {"name": "a", "memory": "100MB"}
        budgets = {0: whole // 2, "cpu": whole // 2}
        return {**least, "device_map": "optimal", "max_memory": budgets, "hardware": {"devices": [device]}}
    return ON_DISK


def alone(model: Any, setting: Setting) -> list[torch.Tensor]:
    """Return the answers of the plain ``model``, each from the same random numbers, by a model that is as it is now."""
    torch.manual_seed(3)
    state, wanted = torch.get_rng_state(), []
    for asked in setting.asked():
        (call,) = calls(copy.deepcopy(model), [asked], **MODES[setting.mode])
        torch.set_rng_state(state)
        wanted.append(call())
    return wanted


@dataclass(frozen=True)
class Prepared:
    """A setting whose checkpoint is saved: the answers of each prompt alone, the bytes of all weights, how it loads."""

    setting: Setting
    folder: Path
    wanted: list[torch.Tensor]
    whole: int
    options: Mapping[str, Any]

    def check(self) -> None:
        """Fail where prompts in lockstep get other tokens than alone, or a pass brings a weight more than once.

        Or where a simulated accelerator holds more than its budget.
        """
        setting, asked, answers = self.setting, self.setting.asked(), dict[int, torch.Tensor]()

        def answer(number: int, call: Call) -> None:
            answers[number] = call()

        with opened(self.folder, **self.options) as loaded:
            tasks = enumerate(calls(loaded.model, asked, **MODES[setting.mode]))
            torch.manual_seed(3)
            group = streamer_of(loaded.model).passes.go_together(
                [partial(answer, number, call) for number, call in tasks], size=setting.size
            )
            assert all(torch.equal(answers[place], each) for place, each in enumerate(self.wanted)), setting
            # An encoder runs as its prompt joins, outside of all passes.
            passes = group.passes + (len(asked) if setting.name == "t5" else 0)
            assert loaded.traffic.streamed_bytes <= passes * self.whole, setting
            assert loaded.traffic.overflow_bytes == 0, setting
            for device, peak in streamer_of(loaded.model)._devices.peaks.items():
                assert peak <= self.options["max_memory"][device], setting
            assert group.passes <= sum(new for _, new in asked), setting


def prepare(setting: Setting, folder: Path) -> Prepared:
    """Save the checkpoint of ``setting``, and have each of its prompts answered alone."""
    plain = saved(folder / "checkpoint", setting.name, setting.dtype)
    whole = sum(parameter.nbytes for parameter in plain.parameters())
    return Prepared(setting, folder, alone(plain, setting), whole, options_of(setting, folder, whole))
