"""Offload of activations: the gradients stay the same bits, and the ratio is held."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from offstage.stages.dispatch.transfer.trace import Trace
from offstage.stages.finetune import CPUOffload
from offstage.stages.machine.devices import Devices
from tests.long_form import in_ci, in_turn
from tests.stages.finetune.trained_models import INPUTS, KINDS, Residual, expected, gradients, llama, net, same

GIB = 2**30
Make = Callable[..., CPUOffload]


def train(kind: str, steps: int, make: Callable[[int], CPUOffload] | None, *, checkpointing: bool = False) -> list[Any]:
    """Return the losses of some steps of AdamW, and all weights after them."""
    make_model, loss_of = KINDS[kind]
    model = make_model()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[Any] = []
    for step in range(steps):
        if make is None:
            loss = loss_of(model, step)
        else:
            with make(step) as context:
                loss = loss_of(model, step)
            ratio, got = context.offload_ratio, context.traffic[context.tag]
            assert step == 0 or got.ratio == pytest.approx(ratio, abs=0.02), got
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *model.state_dict().values()]


@pytest.fixture(scope="module")
def trained() -> Callable[..., list[Any]]:
    """Return what training without offload comes to; each kind is trained once."""
    known: dict[tuple[str, bool], list[Any]] = {}

    def train_once(kind: str, *, checkpointing: bool = False) -> list[Any]:
        if (kind, checkpointing) not in known:
            known[kind, checkpointing] = train(kind, 20, None, checkpointing=checkpointing)
        return known[kind, checkpointing]

    return train_once


@pytest.mark.parametrize(("kind", "ratio"), in_turn(KINDS, [0, 0.1, 0.5, 1.0]))
def test_twenty_steps_give_the_same_bits_at_any_ratio_and_hold_it(
    kind: str, ratio: float, offload: Make, trained: Callable[..., list[Any]]
) -> None:
    assert same(train(kind, 20, lambda step: offload(ratio)), trained(kind))


def test_with_checkpointing_twenty_steps_give_the_same_bits_too(
    offload: Make, trained: Callable[..., list[Any]]
) -> None:
    assert same(train("llama", 20, lambda step: offload(0.5), checkpointing=True), trained("llama", checkpointing=True))


def test_blocks_with_contexts_of_their_own_give_the_same_bits_over_twenty_steps(
    offload: Make, trained: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Residual, "inner", staticmethod(lambda: offload(0.8)))  # one tag for all blocks
    assert same(train("residual", 20, lambda step: offload(0.2, "around")), trained("residual"))


def test_the_ratio_may_change_from_iteration_to_iteration(offload: Make, trained: Callable[..., list[Any]]) -> None:
    assert same(train("residual", 20, lambda step: offload(step % 5 / 4)), trained("residual"))


def test_reentrant_checkpoints_and_a_backward_inside_the_context_give_the_same_bits(offload: Make) -> None:
    model = net()
    for _ in range(3):
        with offload(0.5):
            hidden = INPUTS.clone().requires_grad_()
            for start in range(0, len(model), 4):
                hidden = checkpoint(model[start : start + 4], hidden, use_reentrant=True)
            hidden.square().sum().backward()
        assert same(gradients(model), expected(INPUTS))


def test_nested_contexts_each_hold_their_ratio_and_count_nothing_twice(offload: Make) -> None:
    model = net()
    for _ in range(3):
        with offload(0.3, "outer") as outer:
            hidden = model[:6](INPUTS.clone())
            with offload(1.0, "inner") as inner:
                hidden = model[6:](hidden)
            loss = hidden.square().sum()
        loss.backward()
        assert same(gradients(model), expected(INPUTS))
    all_bytes = [t.kept_bytes + t.offloaded_bytes for t in (outer.traffic["outer"], inner.traffic["inner"])]
    assert sum(all_bytes) == 13 * INPUTS.nbytes  # each layer's input, and the output
    assert outer.traffic["outer"].ratio == pytest.approx(0.3, abs=0.02)
    assert inner.traffic["inner"].ratio == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("ratio", in_ci(0.73, of=[0.1, 0.5, 0.73, 1.0]))
def test_the_ratio_holds_where_sizes_change_with_every_iteration(offload: Make, ratio: float) -> None:
    model = llama("eager")  # its attention weights grow with the square of the length
    for step, length in enumerate([40, 7, 90, 3, 64]):
        tokens = torch.full((1, length), 5)
        with offload(ratio) as context:
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        got = context.traffic[context.tag]
        assert step == 0 or got.ratio == pytest.approx(ratio, abs=0.02), (length, got)


def test_weights_buffers_and_what_the_caller_keeps_are_never_moved(offload: Make) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(1000))
            self.register_buffer("mask", torch.rand(1000))

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return (values * self.mask * self.weight).view(10, 100) @ self.weight[:100].view(100, 1)

    model = Masked()
    values = torch.rand(1000, requires_grad=True)
    for step in range(3):
        with offload(1.0) as context:
            loss = model(values).sum()
        got = context.traffic[context.tag]
        loss.backward()
        moved = [(values * model.mask).nbytes, (values * model.mask).nbytes]
        assert step == 0 or (got.kept_bytes, got.offloaded_bytes) == (0, sum(moved))


def test_what_is_saved_twice_goes_once_and_comes_back_once(offload: Make) -> None:
    trace = Trace()
    for _ in range(2):
        trace._events.clear()
        with offload(1.0, trace=trace) as context:
            hidden = torch.rand(100, 60, requires_grad=True) * 2
            loss = (hidden * hidden).sum() + hidden.view(-1).square().sum() + hidden.t().exp().sum()
        del hidden
        loss.backward()
    ways = [(event["name"], event["args"]["bytes"]) for event in trace._events if "bytes" in event["args"]]
    got = context.traffic[context.tag]
    assert got.offloaded_bytes == 2 * 24_000  # hidden, and its exponential
    assert [name for name, _ in ways].count("activations back") == 2
    assert len(ways) == 4


def test_a_graph_that_is_kept_and_a_double_backward_give_the_same_bits(offload: Make) -> None:
    for _ in range(2):
        model = net()
        with offload(1.0):
            loss = model(INPUTS.clone()).square().sum()
        for _ in range(3):
            loss.backward(retain_graph=True)
            assert same(gradients(model), expected(INPUTS))

    def second_gradients(context: Any) -> list[torch.Tensor]:
        model = net()
        with context:
            loss = model(INPUTS.clone()).square().sum()
            first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            total = sum(gradient.square().sum() for gradient in first)
        assert isinstance(total, torch.Tensor)
        total.backward()
        return gradients(model)

    plain = second_gradients(torch.enable_grad())
    assert same(second_gradients(offload(0.5)), plain)
    assert same(second_gradients(offload(1.0)), plain)


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_what_was_changed_in_place_is_an_error_or_gives_the_bits_of_before(offload: Make, ratio: float) -> None:
    values = torch.rand(5000, requires_grad=True)
    with offload(ratio, str(ratio)):
        hidden = values * 2
        loss = hidden.square().sum()
    hidden.detach().add_(1)
    if ratio == 0:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    else:
        loss.backward()
        assert torch.equal(values.grad, values.detach() * 8)
    with offload(ratio, str(ratio)):
        weight = nn.Parameter(torch.ones(3))
        loss = (weight * torch.ones(3, requires_grad=True)).sum()
    weight.data.add_(0)
    weight.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_memory_that_is_saved_again_after_it_was_written_to_goes_again(offload: Make) -> None:
    for _ in range(2):
        values = torch.rand(5000, requires_grad=True)
        with offload(1.0):
            hidden = values * 2
            before = hidden.square().sum()
            hidden.detach().add_(1)
            loss = before + hidden.square().sum()
        loss.backward()
        assert torch.equal(values.grad, 2 * (2 * (values.detach() * 2) + 2 * (values.detach() * 2 + 1)))


def test_strides_slices_empty_and_odd_tensors_come_back_as_they_were(offload: Make) -> None:
    big = torch.rand(64, 3, 50, 10)
    odd = [
        big.permute(3, 1, 0, 2), big[:, 1], big[5:9], big[::7, :, ::2], big[0, 0, 0, 0].expand(20, 20),
        torch.rand(0, 4), torch.tensor(3.5), torch.rand(7, 5, dtype=torch.complex64).conj(), torch.rand(6, 4).t()[1:],
        torch.rand(3, 4).bfloat16(),
    ]  # fmt: skip

    class Save(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(*tensors)
            return torch.zeros(())

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            came = ctx.saved_tensors
            for got, wanted in zip(came, odd, strict=True):
                assert (got.shape, got.stride(), got.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
                assert torch.equal(got, wanted)
            return (None,) * len(odd)

    for _ in range(3):
        tensors = [tensor.detach().clone(memory_format=torch.preserve_format) for tensor in odd[:0]] + odd
        tensors = [
            tensor.requires_grad_(tensor.is_floating_point()) if tensor.is_leaf else tensor for tensor in tensors
        ]
        with offload(1.0):
            loss = Save.apply(*tensors)
        loss.backward()


def test_autocast_gives_the_same_bits(offload: Make) -> None:
    def run(context: Any) -> list[torch.Tensor]:
        model = net()
        with torch.autocast("cpu", torch.bfloat16), context:
            loss = model(INPUTS).square().sum()
        loss.backward()
        return gradients(model)

    plain = run(torch.enable_grad())
    assert all(same(run(offload(0.5)), plain) for _ in range(3))


def test_a_compiled_model_gives_the_same_bits() -> None:
    model = net(depth=2)
    compiled = torch.compile(model, backend="aot_eager")
    compiled(INPUTS).square().sum().backward()
    plain = gradients(model)
    for _ in range(3):
        with CPUOffload(0.5, "compiled", devices=Devices({0: GIB})) as context:
            loss = compiled(INPUTS).square().sum()
        loss.backward()
        assert same(gradients(model), plain)
    assert context.traffic["compiled"].ratio == pytest.approx(0.5, abs=0.02)
