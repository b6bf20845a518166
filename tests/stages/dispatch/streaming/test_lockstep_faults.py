"""What goes wrong in one of several calls in lockstep leaves nothing behind, however often it happens."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import greenlet
import psutil
import pytest
import torch

import offstage
from offstage.stages.dispatch.loaded_model import LoadedModel
from offstage.stages.dispatch.streaming.streamer import streamer_of
from tests.stages.dispatch.streaming.lockstep_grid import Setting, opened, options_of, saved

ROUNDS = 1000 if os.environ.get("OFFSTAGE_GRID") else 100
PROMPTS = [torch.tensor([[5, 6, 7]]), torch.tensor([[8, 9, 10, 11]]), torch.tensor([[12]])]


@pytest.fixture(scope="module", params=["llama", "mixtral"] if os.environ.get("OFFSTAGE_GRID") else ["mixtral"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    folder = tmp_path_factory.mktemp(request.param)
    saved(folder / "checkpoint", request.param)
    with opened(folder, **options_of(Setting(request.param, place="least"), folder, 0)) as model:
        yield model


def logits(model: Any) -> list[torch.Tensor]:
    """Return the logits of the prompts, which went through the model together."""
    return [output.logits for output in offstage.lockstep(model, [partial(model, ids) for ids in PROMPTS])]


def acquired(model: Any) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.device.type != "meta"}


def failing(model: Any, module: Any, error: type[BaseException], *, before: bool) -> Callable[[], object]:
    """Return a call of ``model`` in which ``module`` throws, in that call alone."""

    def throw(_module: Any, *_: Any) -> None:
        if greenlet.getcurrent() is calls[0]:
            raise error("thrown")

    calls: list[Any] = []

    def call() -> object:
        calls.append(greenlet.getcurrent())
        register = module.register_forward_pre_hook if before else module.register_forward_hook
        with register(throw):
            return model(PROMPTS[0])

    return call


def test_errors_thrown_anywhere_in_one_call_leave_the_model_callable(loaded: LoadedModel) -> None:
    model: Any = loaded.model
    expected, idle, chance = logits(model), acquired(model), random.Random(1)
    modules = [module for module in model.modules() if module is not model]
    for number in range(ROUNDS // 2):
        error, before = chance.choice([ArithmeticError, KeyboardInterrupt]), chance.random() < 0.5
        tasks = [partial(model, ids) for ids in PROMPTS]
        tasks.insert(chance.randrange(3), failing(model, chance.choice(modules), error, before=before))
        with suppress(ArithmeticError, KeyboardInterrupt):
            offstage.lockstep(model, tasks)
        assert acquired(model) == idle
        if number % 10 == 0:
            assert all(map(torch.equal, logits(model), expected))
    assert all(map(torch.equal, logits(model), expected))
    assert loaded.traffic.overflow_bytes == 0


@pytest.mark.long_form
def test_many_rounds_leave_memory_files_and_threads_as_they_were(loaded: LoadedModel) -> None:
    model, process = loaded.model, psutil.Process()

    def run(rounds: int) -> tuple[int, ...]:
        for _ in range(rounds):
            logits(model)
        gc.collect()
        memory, objects = process.memory_info(), [type(each) for each in gc.get_objects()]
        kept = (objects.count(greenlet.greenlet), objects.count(torch.Tensor))
        return memory.rss - memory.shared, process.num_fds(), threading.active_count(), *kept

    warm_memory, *warm = run(ROUNDS // 5)
    memory, *left = run(ROUNDS)
    # Pools of threads grow to their size as luck has it; what each round left would be ten times as much.
    assert all(after - before < ROUNDS // 10 for after, before in zip(left, warm, strict=True)), (warm, left)
    assert memory - warm_memory < 16 * 2**20
    assert not streamer_of(model)._saved.in_calls
