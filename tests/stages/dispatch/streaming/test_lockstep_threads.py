"""Threads whose calls of one model share each pass of the weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import offstage
from offstage.stages.dispatch.loaded_model import LoadedModel
from offstage.stages.dispatch.streaming.streamer import streamer_of
from tests.stages.dispatch.streaming.lockstep_grid import MODES, Setting, alone, calls, opened, saved

SETTING = Setting("llama", torch.float32, mode="sampled")


def together(loaded: LoadedModel, tasks: Sequence[Callable[[], torch.Tensor]]) -> list[Future[torch.Tensor]]:
    """Call ``tasks``, each in a thread of its own, once all have joined; return what came of them."""

    def answer(task: Callable[[], torch.Tensor]) -> torch.Tensor:
        with offstage.in_lockstep(loaded.model):
            return task()

    with ThreadPoolExecutor(len(tasks)) as pool:
        with offstage.in_lockstep(loaded.model):  # as long as this thread is inside, none of the others goes on
            found = [pool.submit(answer, task) for task in tasks]
            group: Any = streamer_of(loaded.model)._passes.turns
            while group.started < len(tasks) + 1:
                time.sleep(0.001)
        return found


def test_each_thread_has_the_tokens_that_it_has_alone_and_a_pass_brings_a_weight_once(tmp_path: Path) -> None:
    plain = saved(tmp_path / "checkpoint", "llama", SETTING.dtype)
    wanted, asked = alone(plain, SETTING), SETTING.asked()
    with opened(tmp_path) as loaded:
        torch.manual_seed(3)
        state, tasks = torch.get_rng_state(), calls(loaded.model, asked, **MODES["sampled"])
        answers = [each.result() for each in together(loaded, tasks)]
        assert all(map(torch.equal, answers, wanted))
        assert torch.equal(torch.get_rng_state(), state), "whoever started them has random numbers of its own"
        passes, whole = max(new for _, new in asked), sum(each.nbytes for each in plain.parameters())
        assert loaded.traffic.streamed_bytes <= passes * whole
        assert torch.equal(tasks[0](), wanted[0]), "it can be called alone again"


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
def test_the_error_of_one_ends_all_and_the_model_goes_on(error: type[BaseException], tmp_path: Path) -> None:
    plain, asked = saved(tmp_path / "checkpoint", "llama", SETTING.dtype), SETTING.asked()[:3]
    wanted = [call() for call in calls(plain, asked)]

    def failing() -> torch.Tensor:
        thread = threading.get_ident()

        def throw(_module: Any, _args: Any) -> None:
            if threading.get_ident() == thread:
                raise error("enough")

        with loaded.model.model.layers[1].mlp.register_forward_pre_hook(throw):
            return calls(loaded.model, asked)[0]()

    with opened(tmp_path) as loaded:
        others = [partial(call, min_new_tokens=5) for call in calls(loaded.model, [(asked[0][0], 40)] * 2)]
        first, *rest = together(loaded, [failing, *others])
        assert isinstance(first.exception(), error)
        for other in rest:
            with pytest.raises(RuntimeError, match=r"another thread's call .* failed: .*enough"):
                other.result()
        answers = [each.result() for each in together(loaded, calls(loaded.model, asked))]
        assert all(map(torch.equal, answers, wanted))
        assert torch.equal(calls(loaded.model, asked)[0](), wanted[0])


def test_what_can_not_go_together_is_refused(tmp_path: Path) -> None:
    model = saved(tmp_path / "checkpoint", "llama")
    with pytest.raises(ValueError, match="this LlamaForCausalLM isn't dispatched"):
        offstage.in_lockstep(model)
    with opened(tmp_path) as loaded:
        with offstage.in_lockstep(loaded.model):
            with pytest.raises(RuntimeError, match="go in lockstep already"), offstage.in_lockstep(loaded.model):
                pass
            with pytest.raises(RuntimeError, match="under way already"):
                offstage.lockstep(loaded.model, [])
            torch.set_grad_enabled(True)
            with pytest.raises(RuntimeError, match="turned gradients on"):
                loaded.model(torch.tensor([[1, 2]]))
            torch.set_grad_enabled(False)
        assert loaded.model(torch.tensor([[1, 2]])).logits.shape == (1, 2, 96)
