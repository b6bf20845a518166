"""Calls in lockstep share each pass of the weights, and none of their bits."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import offstage
from offstage.stages.dispatch.streaming.streamer import streamer_of
from tests.long_form import in_ci
from tests.stages.dispatch.streaming.lockstep_grid import CONFIGS, WORDS, Asked, calls, drawn, opened, prepare, saved

ACCELERATORS = {
    "device_map": {"model.embed_tokens": 0, "model.rotary_emb": 0,
                   "model.layers.0": "disk", "model.layers.1": 1, "model.layers.2": "cpu",
                   "model.norm": 1, "lm_head": "disk"},
    "max_memory": {0: "1MB", 1: "1MB", "cpu": "1GB"}, "storage": {"io": "direct"},
    "hardware": {"devices": [{"name": "a", "memory": "100MB"}, {"name": "b", "memory": "100MB"}]},
}  # fmt: skip
IN_CI = ("qwen3_moe", "t5", "mistral, which slides", "recurrent_gemma", "llama, dynamic rope")
SETTINGS = int(os.environ.get("OFFSTAGE_GRID", "0"))


def prompts(count: int) -> Asked:
    """Return token ids of different lengths, and how many new tokens follow each."""
    lengths = [1 + 7 * number % 23 for number in range(count)]
    return [(torch.randint(3, WORDS, (1, length)), 1 + 5 * place % 9) for place, length in enumerate(lengths)]


@pytest.mark.parametrize("name", in_ci(*IN_CI, of=CONFIGS))
def test_each_has_the_tokens_that_it_has_alone_and_a_pass_brings_a_weight_once(name: str, tmp_path: Path) -> None:
    """``OFFSTAGE_GRID=40`` draws so many settings for each model, of up to 32 prompts together: minutes."""
    for number in range(SETTINGS or 1):
        prepare(drawn(name, number, largest=32 if SETTINGS else 5), tmp_path / str(number)).check()


def test_passes_are_as_many_as_the_longest_way_through_the_group(tmp_path: Path) -> None:
    saved(tmp_path / "checkpoint", "llama")
    asked = [(torch.randint(3, WORDS, (1, 4)), new) for new in (5, 2, 3, 1)]
    with opened(tmp_path) as loaded:
        streamer, one = streamer_of(loaded.model), sum(p.nbytes for p in loaded.model.parameters())
        group = streamer.passes.go_together(calls(loaded.model, asked), size=2)
        # 5 tokens beside 2, then 3; the last joins where the first leaves.
        assert group.passes == 6
        assert loaded.traffic.streamed_bytes <= 6 * one


@pytest.mark.parametrize("dtype", in_ci(torch.float16, of=[torch.float32, torch.float16]))
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

        def recording() -> None:
            torch.set_grad_enabled(True)
            loaded.model(torch.tensor([[1, 2]]))

        with pytest.raises(RuntimeError, match="turned gradients on"):
            offstage.lockstep(loaded.model, [recording], size=1)
        assert offstage.lockstep(loaded.model, []) == []


def test_a_call_divides_into_several_that_go_with_all_others(tmp_path: Path) -> None:
    plain = saved(tmp_path / "checkpoint", "llama", torch.float32)
    asked, sampled = prompts(6), {"do_sample": True}

    def parted(model: Any, first: int, size: int) -> list[torch.Tensor]:
        before = model.generate(asked[first][0], max_new_tokens=2, **sampled)
        inner = offstage.lockstep(model, calls(model, asked[first : first + 3], **sampled), size=size)
        return [before, *inner, model.generate(asked[first][0], max_new_tokens=2, **sampled)]

    with opened(tmp_path) as loaded:
        wanted = []
        for first in (0, 3):
            torch.manual_seed(5)
            wanted.append(offstage.lockstep(loaded.model, [partial(parted, loaded.model, first, 3)])[0])
        for size in (1, 2, 3):
            torch.manual_seed(5)
            before = loaded.traffic.streamed_bytes
            answers = offstage.lockstep(loaded.model, [partial(parted, loaded.model, first, size) for first in (0, 3)])
            for mine, theirs in zip(answers, wanted, strict=True):
                assert all(map(torch.equal, mine, theirs))
        passes = 4 + max(new for _, new in asked)
        whole = sum(parameter.nbytes for parameter in plain.parameters())
        assert loaded.traffic.streamed_bytes - before <= passes * whole, "parts of both share passes"


def test_the_error_of_a_part_is_its_wholes_and_the_others_go_on(tmp_path: Path) -> None:
    plain = saved(tmp_path / "checkpoint", "llama", torch.float32)
    asked = prompts(3)
    wanted = [call() for call in calls(plain, asked)]

    def failing(model: Any) -> str:
        def fail() -> None:
            model(torch.tensor([[1, 2]]))
            raise ArithmeticError("enough")

        with pytest.raises(ArithmeticError, match="enough"):
            offstage.lockstep(model, [*calls(model, asked[:1]), fail])
        return "goes on"

    with opened(tmp_path) as loaded:
        said, *answers = offstage.lockstep(loaded.model, [partial(failing, loaded.model), *calls(loaded.model, asked)])
        assert said == "goes on"
        assert all(map(torch.equal, answers, wanted))
        with (
            pytest.raises(RuntimeError, match="inside a pass"),
            loaded.model.model.layers[0].register_forward_hook(lambda *_: offstage.lockstep(loaded.model, [])),
        ):
            offstage.lockstep(loaded.model, calls(loaded.model, asked[:1]))
        assert torch.equal(calls(loaded.model, asked)[0](), wanted[0])
