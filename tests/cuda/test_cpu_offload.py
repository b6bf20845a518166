"""Offload of activations from a real accelerator: the same bits, less memory, copies beside the computing."""

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

from offstage.stages.finetune import CPUOffload

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
]

MIB = 2**20
WIDTH, ROWS, DEPTH = 1024, 4096, 12


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)))
    return nn.Sequential(*layers).to("cuda:0")


def step(model: nn.Module, context: Any) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """Return the loss and gradients of one step, and the most bytes that it had allocated beyond those before it."""
    torch.manual_seed(1)
    inputs = torch.randn(ROWS, WIDTH, device="cuda:0")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with context:
        loss = model(inputs).square().mean()
    loss.backward()
    peak = torch.cuda.max_memory_allocated() - before
    taken = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return loss.detach(), taken, peak


@pytest.mark.parametrize("ratio", [0, 0.1, 0.5, 1.0])
def test_twenty_steps_give_the_same_bits_at_any_ratio(ratio: float) -> None:
    plain_loss, plain, _ = step(net(), torch.enable_grad())
    model = net()
    for _ in range(20):
        context = CPUOffload(ratio, f"cuda {ratio}")
        loss, taken, _ = step(model, context)
        assert torch.equal(loss, plain_loss)
        assert all(torch.equal(a, b) for a, b in zip(taken, plain, strict=True))
    assert context.traffic[context.tag].ratio == pytest.approx(ratio, abs=0.02)


def test_the_peak_falls_with_the_ratio() -> None:
    model = net()
    peaks = {}
    for ratio in (0, 0.25, 0.5, 0.75, 1.0):
        for _ in range(3):
            _, _, peaks[ratio] = step(model, CPUOffload(ratio, f"peak {ratio}"))
    saved = 3 * DEPTH * ROWS * WIDTH * 4
    for ratio, peak in peaks.items():
        assert peak - peaks[0] == pytest.approx(-ratio * saved, abs=0.12 * saved), peaks
    _, _, all_on_host = step(model, save_on_cpu(pin_memory=True))
    assert peaks[1.0] < 1.3 * all_on_host


def test_writing_to_what_is_leaving_is_an_error_or_changes_no_gradient() -> None:
    """A copy out may still be under way when the program goes on to write to its source."""
    wanted = None
    for ratio in (0.0, 1.0, 1.0, 1.0):
        values = torch.ones(64 * MIB // 4, device="cuda:0", requires_grad=True)
        with CPUOffload(ratio, "written"):
            hidden = values * 3
            loss = hidden.square().sum()
            hidden.detach().mul_(2)
        try:
            loss.backward()
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)  # noqa: PT017
            continue
        wanted = torch.full_like(values, 18)
        assert torch.equal(values.grad, wanted)


def test_forwards_on_another_stream_give_the_same_bits() -> None:
    _, plain, _ = step(net(), torch.enable_grad())
    model, stream = net(), torch.cuda.Stream()
    for _ in range(3):
        with torch.cuda.stream(stream):
            _, taken, _ = step(model, CPUOffload(0.7, "stream"))
        stream.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(taken, plain, strict=True))


def test_a_graph_that_is_dropped_leaves_no_memory() -> None:
    model = net()
    for _ in range(2):
        step(model, CPUOffload(0.6, "dropped"))
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        with CPUOffload(0.6, "dropped"):
            loss = model(torch.randn(ROWS, WIDTH, device="cuda:0")).mean()
        del loss
    gc.collect()
    assert torch.cuda.memory_allocated() == before
