"""Calls in lockstep share each pass of the weights, and none of their bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import offstage
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
    T5Config,
)

from stages.dispatch.loaded_model import LoadedModel, load
from stages.dispatch.streaming.streamer import streamer_of

WORDS = 96
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
CONFIGS: Mapping[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, vocab_size=WORDS, num_key_value_heads=2),
    "mixtral": MixtralConfig(**SIZES, vocab_size=WORDS, num_key_value_heads=2, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, vocab_size=WORDS, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "mamba": MambaConfig(hidden_size=32, num_hidden_layers=3, vocab_size=WORDS, state_size=8),
    "t5": T5Config(
        d_model=32, d_ff=48, num_layers=2, num_heads=4, d_kv=8, vocab_size=WORDS, decoder_start_token_id=0
    ),
}  # fmt: skip
ON_DISK = {"device_map": "disk", "storage": {"io": "direct"}}
ACCELERATORS = {
    "device_map": {"model.embed_tokens": 0, "model.rotary_emb": 0,
                   "model.layers.0": "disk", "model.layers.1": 1, "model.layers.2": "cpu",
                   "model.norm": 1, "lm_head": "disk"},
    "max_memory": {0: "1MB", 1: "1MB", "cpu": "1GB"}, "storage": {"io": "direct"},
    "hardware": {"devices": [{"name": "a", "memory": "1MB"}, {"name": "b", "memory": "1MB"}]},
}  # fmt: skip
Call = Callable[[], torch.Tensor]


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


def prompts(count: int) -> list[tuple[torch.Tensor, int]]:
    """Return token ids of different lengths, and how many new tokens follow each."""
    lengths = [1 + 7 * number % 23 for number in range(count)]
    return [(torch.randint(3, WORDS, (1, length)), 1 + 5 * place % 9) for place, length in enumerate(lengths)]


def calls(model: Any, asked: list[tuple[torch.Tensor, int]], **options: Any) -> list[Call]:
    options = {"do_sample": False, **options}
    return [partial(model.generate, ids, max_new_tokens=new, **options) for ids, new in asked]


def opened(folder: Path, **options: Any) -> LoadedModel:
    return load(folder / "checkpoint", cache=folder / "cache", **{**ON_DISK, **options})


@pytest.mark.parametrize("name", CONFIGS)
def test_each_has_the_tokens_that_it_has_alone_and_a_pass_is_brought_once(name: str, tmp_path: Path) -> None:
    plain, asked = saved(tmp_path / "checkpoint", name), prompts(7)
    wanted = [call() for call in calls(plain, asked)]
    with opened(tmp_path) as loaded:
        for call in calls(loaded.model, asked):
            call()
        tokens = [new for _, new in asked]
        a_pass = loaded.traffic.streamed_bytes / sum(tokens)
        for size in (2, 3, 7):
            before = loaded.traffic.streamed_bytes
            answers = offstage.lockstep(loaded.model, calls(loaded.model, asked), size=size)
            assert all(map(torch.equal, answers, wanted)), size
            together = loaded.traffic.streamed_bytes - before
            # Encoders run as each joins, and experts are those of all: what a pass shares is still most of it.
            assert together <= a_pass * max(sum(tokens) / size, *tokens) * (1.3 if name == "llama" else 1.8), size
        assert loaded.traffic.overflow_bytes == 0


def test_passes_are_as_many_as_the_longest_way_through_the_group(tmp_path: Path) -> None:
    saved(tmp_path / "checkpoint", "llama")
    asked = [(torch.randint(3, WORDS, (1, 4)), new) for new in (5, 2, 3, 1)]
    with opened(tmp_path) as loaded:
        streamer, one = streamer_of(loaded.model), sum(p.nbytes for p in loaded.model.parameters())
        group = streamer.go_together(calls(loaded.model, asked), size=2)
        # 5 tokens beside 2, then 3; the last joins where the first leaves.
        assert (group.passes, group.started) == (6, 4)
        assert loaded.traffic.streamed_bytes <= 6 * one


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_and_samples(dtype: torch.dtype, tmp_path: Path) -> None:
    plain, asked = saved(tmp_path / "checkpoint", "llama", dtype), prompts(5)
    torch.manual_seed(3)
    state, wanted = torch.get_rng_state(), []
    for call in calls(plain, asked, do_sample=True):
        torch.set_rng_state(state)
        wanted.append(call())
    with opened(tmp_path) as loaded:
        torch.set_rng_state(state)
        answers = offstage.lockstep(loaded.model, calls(loaded.model, asked, do_sample=True), size=5)
    assert all(map(torch.equal, answers, wanted))
    assert torch.equal(torch.get_rng_state(), state), "whoever called them has random numbers of its own"


def test_over_two_simulated_accelerators(tmp_path: Path) -> None:
    plain, asked = saved(tmp_path / "checkpoint", "llama"), prompts(4)
    wanted = [call() for call in calls(plain, asked)]
    with opened(tmp_path, **ACCELERATORS) as loaded:
        assert all(map(torch.equal, offstage.lockstep(loaded.model, calls(loaded.model, asked), size=4), wanted))


def test_a_model_that_the_fields_functions_dispatched(tmp_path: Path) -> None:
    plain, asked = saved(tmp_path / "checkpoint", "llama"), prompts(4)
    wanted = [call() for call in calls(plain, asked)]
    model = offstage.disk_offload(plain, tmp_path / "offload", execution_device="cpu")
    assert all(map(torch.equal, offstage.lockstep(model, calls(model, asked), size=4), wanted))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_error_of_one_ends_all_and_the_model_goes_on(error: type[BaseException], tmp_path: Path) -> None:
    plain, asked = saved(tmp_path / "checkpoint", "llama"), prompts(3)
    wanted = [call() for call in calls(plain, asked)]
    ended: list[str] = []

    def failing() -> torch.Tensor:
        def break_off(_module: Any, _args: Any) -> None:
            raise error("enough")

        with loaded.model.model.layers[1].mlp.register_forward_pre_hook(break_off):
            return calls(loaded.model, asked)[0]()

    def watched() -> torch.Tensor:
        try:
            return calls(loaded.model, asked)[1]()
        finally:
            ended.append("its own clearing up")

    with opened(tmp_path) as loaded:
        with pytest.raises(error, match="enough"):
            offstage.lockstep(loaded.model, [watched, failing], size=2)
        assert ended
        assert all(map(torch.equal, offstage.lockstep(loaded.model, calls(loaded.model, asked), size=3), wanted))
        assert torch.equal(calls(loaded.model, asked)[0](), wanted[0])
        assert loaded.traffic.overflow_bytes == 0


def test_what_can_not_go_together_is_refused(tmp_path: Path) -> None:
    model = saved(tmp_path / "checkpoint", "llama")
    with pytest.raises(ValueError, match="this LlamaForCausalLM isn't dispatched"):
        offstage.lockstep(model, [])
    with opened(tmp_path) as loaded:
        with pytest.raises(ValueError, match="size: 0 is no number of calls"):
            offstage.lockstep(loaded.model, [], size=0)
        inner = partial(offstage.lockstep, loaded.model, calls(loaded.model, prompts(1)))
        with pytest.raises(RuntimeError, match="under way already"):
            offstage.lockstep(loaded.model, [inner])

        def recording() -> None:
            torch.set_grad_enabled(True)
            loaded.model(torch.tensor([[1, 2]]))

        with pytest.raises(RuntimeError, match="turned gradients or inference_mode on"):
            offstage.lockstep(loaded.model, [recording], size=1)
        assert offstage.lockstep(loaded.model, []) == []
