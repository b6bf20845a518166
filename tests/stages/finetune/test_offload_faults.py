"""Offload of activations when something goes wrong or goes on for long: one clear error, and nothing left behind."""

import gc
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offstage.pipeline.errors import BudgetError, ConfigError
from offstage.stages.finetune import CPUOffload
from offstage.stages.finetune.offload_choice import say_that_nothing_goes
from offstage.stages.machine.devices import Devices
from tests.stages.finetune.trained_models import INPUTS, expected, gradients, net, same
from tests.stages.reading_threads import settle

GIB = 2**30
Make = Callable[..., CPUOffload]


def test_a_context_that_is_closed_twice_leaves_the_hooks_of_others(offload: Make) -> None:
    model = net()
    for _ in range(2):
        with offload(0.5, "outer") as outer:
            inner = offload(1.0, "inner")
            with inner:
                hidden = model[:6](INPUTS.clone())
            inner.__exit__(None, None, None)
            loss = model[6:](hidden).square().sum()
        outer.__exit__(None, None, None)
        loss.backward()
        assert same(gradients(model), expected(INPUTS))
    assert outer.traffic["outer"].offloaded_bytes > 0


def test_threads_with_one_tag_dont_disturb_each_other(offload: Make) -> None:
    results: list[bool] = []
    wanted = expected(INPUTS)

    def work(model: nn.Module) -> None:
        for _ in range(5):
            with offload(0.5, "threads"):
                loss = model(INPUTS.clone()).square().sum()
            loss.backward()
            results.append(same(gradients(model), wanted))

    threads = [threading.Thread(target=work, args=(net(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 15


def waiting(context: CPUOffload) -> int:
    """Return how many bytes are away under the tag of ``context``, in the end."""
    gc.collect()
    settle()
    return sum(arena.used for _, store in context._history.stores.values() for arena in store._arenas)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception_nothing_is_left_and_the_next_iteration_is_right(offload: Make, where: str) -> None:
    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
            if where == "forward":
                raise KeyError("forward")
            return hidden.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            raise KeyError("backward")

    def fail(model: nn.Sequential) -> None:
        with offload(0.7):
            loss = model[6:](Fail.apply(model[:6](INPUTS.clone()))).square().sum()
        loss.backward()

    model = net()
    for _ in range(2):
        with pytest.raises(KeyError, match=where):
            fail(model)
    model.zero_grad()
    assert waiting(offload(0)) == 0
    for _ in range(2):
        with offload(0.7):
            loss = model(INPUTS.clone()).square().sum()
        loss.backward()
        assert same(gradients(model), expected(INPUTS))


def test_memory_and_files_that_are_no_longer_used_are_given_back_after_a_while(offload: Make) -> None:
    model = net()
    reserved = []
    for ratio in [1.0] * 3 + [0.0] * 10:
        with offload(ratio, "idle") as context:
            loss = model(INPUTS.clone()).square().sum()
        loss.backward()
        reserved.append([store.size for _, store in context._history.stores.values()])
    assert reserved[0][0] > 0
    assert reserved[:10] == [reserved[0]] * 10
    assert reserved[-1] == [0]


def test_what_is_remembered_goes_with_the_model(offload: Make) -> None:
    model = net()
    with offload(0.5, "gone") as context:
        model(INPUTS).sum().backward()
    assert context._history is offload(0.5, "gone")._history
    del model
    gc.collect()
    assert context._history is not offload(0.5, "gone")._history


def test_the_ledger_counts_what_stays_and_what_has_come_back_and_its_peak_falls_with_the_ratio() -> None:
    peaks = {}
    for ratio in (0, 0.25, 0.5, 0.75, 1.0):
        model = net(width=64, depth=20)
        for _ in range(2):
            devices = Devices({0: GIB})
            with CPUOffload(ratio, f"peak {ratio}", devices=devices):
                loss = model(torch.ones(50, 64)).square().sum()
            after_forward = devices.peaks[0]
            loss.backward()
            ledger = devices.ledger(0)
            assert ledger is not None
            assert ledger.allocated == 0
        everything = 41 * 50 * 64 * 4
        assert after_forward == pytest.approx((1 - ratio) * everything, abs=0.02 * everything)
        peaks[ratio] = devices.peaks[0] / everything
    assert peaks == {ratio: pytest.approx(1 - ratio, abs=0.03 if ratio < 1 else 0.06) for ratio in peaks}


def test_a_simulated_accelerator_that_is_too_small_says_so() -> None:
    model = net()
    for _ in range(2):
        devices = Devices({0: 40_000})
        context = CPUOffload(0.1, "small", devices=devices)
        with pytest.raises(BudgetError, match=r"max_memory.0: the simulated accelerator 0 is full"), context:
            model(INPUTS)
        with CPUOffload(0.9, "fits", devices=devices):
            loss = model(INPUTS).square().sum()
        loss.backward()
        assert same(gradients(model), expected(INPUTS))


def test_on_the_host_alone_activations_stay_and_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    say_that_nothing_goes.cache_clear()
    model = net()
    with caplog.at_level(logging.WARNING, "offstage"):
        for _ in range(2):
            with CPUOffload(1.0, "host") as context:
                loss = model(INPUTS).square().sum()
            loss.backward()
    assert same(gradients(model), [2 * gradient for gradient in expected(INPUTS)])
    assert context.traffic["host"].offloaded_bytes == 0
    assert [record.message for record in caplog.records if "target='disk' offloads them" in record.message] != []
    assert len(caplog.records) == 1


def test_forty_iterations_leave_memory_files_and_descriptors_as_they_were(offload: Make, tmp_path: Path) -> None:
    model = net()

    def state() -> tuple[int, int, list[Path], int]:
        gc.collect()
        reserved = sum(store.size for _, store in offload(0)._history.stores.values())
        descriptors = list(Path("/proc/self/fd").iterdir())
        return reserved, len(descriptors), list(tmp_path.iterdir()), len(gc.get_objects())

    for step in range(40):
        with offload(0.6):
            loss = model(INPUTS.clone()).square().sum()
        loss.backward()
        model.zero_grad()
        if step == 10:
            early = state()
    late = state()
    assert late[:3] == early[:3]
    assert late[3] < early[3] + 50


@pytest.mark.parametrize("ratio", [-0.1, 1.5, float("nan"), float("inf"), "0.5", True, None])
def test_a_ratio_that_is_no_share_is_refused_as_the_context_is_made(ratio: Any) -> None:
    with pytest.raises(ConfigError, match=r"offload_ratio: .* from 0 \(all stay\) to 1 \(all go\)"):
        CPUOffload(ratio)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tag": ""}, "tag: '' names nothing"),
        ({"tag": 3}, "tag: 3 names nothing"),
        ({"target": "dsk"}, r"target: 'dsk' is neither 'host' nor 'disk' \(did you mean 'disk'\?\)"),
        ({"folder": "/tmp"}, "folder: '/tmp' is for target='disk' alone"),
    ],
)
def test_what_cant_be_is_refused_as_the_context_is_made(options: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CPUOffload(0.1, **options)
