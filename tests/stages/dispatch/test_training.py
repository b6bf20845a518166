"""Training through streamed weights: gradients are those of the model in memory, and no weight is kept for them."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from offstage.stages.finetune import CPUOffload
from tests.long_form import in_turn
from tests.stages.dispatch.adapted_llama import TOKENS, adapted_llama, equal, on_stage, trained
from tests.stages.dispatch.late_link import LateLink
from tests.stages.dispatch.placed_models import LAYOUTS, Setup, X, net

STEPS = 20
STAGING = 600_000
Stage = Callable[..., Setup]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """Return a function that streams a small net of linear layers; they are in memory again in the end."""
    stages = []

    def run(layout: str = "disk", model: nn.Module | None = None) -> Setup:
        folder = tmp_path / str(len(stages))
        folder.mkdir()
        stages.append(Setup(model or net(), LAYOUTS[layout], folder))
        return stages[-1]

    yield run
    for each in stages:
        each.streamer.remove()


@cache
def expected_training(checkpointing: str | None) -> list[torch.Tensor]:
    return trained(adapted_llama(checkpointing), STEPS)


@pytest.mark.parametrize(("checkpointing", "where"), in_turn([None, "reentrant", "other"], ["disk", "accelerators"]))
def test_adapters_learn_the_same_bits_in_a_budget_that_is_kept(where, checkpointing, tmp_path) -> None:
    model = adapted_llama(checkpointing)
    stage = on_stage(model, where, tmp_path, staging_bytes=STAGING)
    resident = [stage.ledger(device).allocated for device in (0, 1)]
    assert equal(trained(model, STEPS), expected_training(checkpointing))
    assert stage.streamer.traffic.overflow_bytes == 0
    assert [stage.ledger(device).peak for device in (0, 1)] == resident, "staging is there from the beginning"
    stage.streamer.remove()


def test_the_backward_reads_ahead_what_the_forward_read_and_no_more(tmp_path: Path) -> None:
    model = adapted_llama()
    stage = on_stage(model, "disk", tmp_path, staging_bytes=STAGING)
    trained(model, 3)
    traffic = stage.streamer.traffic
    before, taken = traffic.storage_bytes, traffic.streamed_bytes
    trained(model, 1)
    assert traffic.storage_bytes - before < 1.1 * (traffic.streamed_bytes - taken), "what was read ahead was used"
    stage.streamer.remove()


def gradient(model: nn.Module) -> torch.Tensor:
    given = X.clone().requires_grad_()
    model(given).square().sum().backward()
    assert given.grad is not None
    return given.grad


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_of_the_input_is_the_same_wherever_weights_lie(layout: str, stage: Stage) -> None:
    expected, placed = gradient(net()), stage(layout)
    assert all(torch.equal(gradient(placed.model), expected) for _ in range(3))
    assert placed.streamer.traffic.overflow_bytes == 0


def pushed() -> object:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_hooks_are_there_in_calls_with_gradients_alone(
    mode: Callable[[], AbstractContextManager[None]], stage: Stage
) -> None:
    model, seen = stage().model, []
    for layer in model.modules():
        layer.register_forward_pre_hook(lambda _module, _args: seen.append(pushed() is not None))
    with mode():
        model(X)
        assert any(seen) == (mode is torch.enable_grad)
        assert pushed() is None


def test_all_that_is_no_streamed_weight_is_handed_to_the_hooks_around(stage: Stage) -> None:
    expected, model = gradient(net()), stage().model
    addresses, packed = [], []
    for layer in model.modules():
        if isinstance(layer, (nn.Linear, nn.LayerNorm)):
            layer.register_forward_pre_hook(lambda module, _args: addresses.append(module.weight.data_ptr()))

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.data_ptr())
        return tensor.clone()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        assert torch.equal(gradient(model), expected)
    assert len(packed) > 8
    assert not {*packed} & {*addresses}
    with save_on_cpu():
        assert torch.equal(gradient(model), expected)


def test_hooks_inside_the_model_get_no_streamed_weight_either(stage: Stage) -> None:
    class Offloading(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with save_on_cpu():
                return self.inner(x)

    placed = stage(model=nn.Sequential(*(Offloading(layer) for layer in net())), layout="disk")
    assert torch.equal(gradient(placed.model), gradient(net()))
    assert placed.streamer.traffic.overflow_bytes == 0


def test_a_graph_that_is_kept_is_gone_through_twice(stage: Stage) -> None:
    model, gradients = stage().model, []
    for each in (net(), model):
        x = X.clone().requires_grad_()
        y = each(x).square().sum()
        gradients.append([torch.autograd.grad(y, x, retain_graph=True)[0], torch.autograd.grad(y, x)[0]])
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(y, x)
    assert equal(*gradients)


def test_two_graphs_are_gone_through_in_any_order(stage: Stage) -> None:
    model, expected = stage().model, [gradient(net()), gradient(net())]
    for order in ((0, 1), (1, 0)):
        inputs = [X.clone().requires_grad_() for _ in range(2)]
        outputs = [model(x).square().sum() for x in inputs]
        for place in order:
            outputs[place].backward()
        assert equal([x.grad for x in inputs if x.grad is not None], expected)


def test_gradients_of_gradients_are_the_same(stage: Stage) -> None:
    gradients = []
    for model in (net(), stage().model):
        x = X.clone().requires_grad_()
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        gradients.append(torch.autograd.grad(first.square().sum(), x)[0])
    assert torch.equal(*gradients)


@pytest.mark.parametrize("layout", ["disk", "mixed"])
def test_a_backward_after_the_hooks_are_gone_reads_what_it_needs(layout: str, stage: Stage) -> None:
    placed, x = stage(layout), X.clone().requires_grad_()
    y = placed.model(x).square().sum()
    carriers = [weakref.ref(cache._mover) for cache in placed.streamer._caches]
    placed.streamer.remove()
    gc.collect()
    assert carriers
    assert not any(carrier() for carrier in carriers), "the graph holds no staging memory"
    y.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, gradient(net()))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_leaves_no_hook_and_no_weight(where: str, stage: Stage) -> None:
    placed, expected = stage(), gradient(net())
    thrower = placed.model[2][0]
    register = thrower.register_forward_pre_hook if where == "forward" else thrower.register_full_backward_hook
    handle = register(lambda *_: 1 / 0)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            gradient(placed.model)
        assert pushed() is None
    handle.remove()
    assert torch.equal(gradient(placed.model), expected)
    assert placed.streamer.traffic.overflow_bytes == 0


@pytest.mark.parametrize("caught_inside", [True, False])
@pytest.mark.parametrize("again_inside", [True, False])
def test_an_interrupt_leaves_nothing_behind_once_the_model_is_called_again(
    caught_inside: bool, again_inside: bool, stage: Stage
) -> None:
    placed, expected = stage(), gradient(net())
    placed.model[1][0].register_forward_pre_hook(interrupt := Interrupt())
    if caught_inside:
        with save_on_cpu(), pytest.raises(KeyboardInterrupt):
            gradient(placed.model)
    else:
        with pytest.raises(KeyboardInterrupt), save_on_cpu():
            gradient(placed.model)
    interrupt.over = True
    if again_inside:
        with save_on_cpu():
            assert torch.equal(gradient(placed.model), expected)
    else:
        assert torch.equal(gradient(placed.model), expected)
    assert pushed() is None


class Interrupt:
    """A hook that is an interrupt until it is over."""

    over = False

    def __call__(self, *_: object) -> None:
        if not self.over:
            raise KeyboardInterrupt


@pytest.mark.parametrize("layout", ["host", "disk"])
def test_a_gradient_that_would_be_lost_is_refused_by_name(layout: str, stage: Stage) -> None:
    placed, expected = stage(layout), gradient(net())
    for parameter in placed.model.parameters():
        parameter.requires_grad_(True)
    answers = [placed.model(X) for _ in range(2)]
    assert all(torch.equal(answer, net()(X)) and answer.requires_grad for answer in answers), "calls are served"
    x = X.clone().requires_grad_()
    assert torch.equal(torch.autograd.grad(placed.model(x).square().sum(), x)[0], expected)
    assert placed.streamer.traffic.overflow_bytes == 0, "graphs keep no weights"
    for name, parameter in placed.model.named_parameters():
        parameter.requires_grad_(name == "1.3.weight")
    with pytest.raises(RuntimeError, match=r"'1\.3\.weight' is streamed, and its gradient would be lost.*freeze it"):
        placed.model(X).sum().backward()


def test_what_was_changed_since_it_was_saved_is_refused_as_torch_does(stage: Stage) -> None:
    model = nn.Sequential(stage(model=nn.Sequential(nn.Sequential(nn.LayerNorm(64)))).model, nn.Identity())
    for each in (nn.LayerNorm(64), model):
        given = X.clone().requires_grad_() * 1
        y = each(given)
        given.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_a_call_of_one_module_alone_has_right_gradients_too(stage: Stage) -> None:
    model, gradients = stage().model, []
    for each in (net(), model):
        x = X.clone().requires_grad_()
        each[1](x).square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_model_that_is_one_checkpoint_has_right_gradients(use_reentrant: bool, stage: Stage) -> None:
    placed, expected = stage(), gradient(net())
    for _ in range(2):
        x = X.clone().requires_grad_()
        checkpoint(placed.model, x, use_reentrant=use_reentrant).square().sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, expected)
    assert placed.streamer.traffic.overflow_bytes == 0
    assert pushed() is None


@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_activations_are_offloaded_around_a_streamed_model_as_around_the_plain_one(ratio: float, tmp_path) -> None:
    plain, model, runs = adapted_llama(), adapted_llama(), []
    stage = on_stage(model, "disk", tmp_path, staging_bytes=STAGING)
    for each, name in ((plain, "plain"), (model, "streamed")):
        offload = CPUOffload(ratio, tag=f"{name} {ratio}", target="disk", folder=tmp_path)

        def step(model: Any, offload: CPUOffload = offload) -> torch.Tensor:
            with offload:
                return model(TOKENS, labels=TOKENS).loss

        runs.append((trained(each, 4, step), offload.traffic.popitem()[1]))
    assert equal(runs[0][0], runs[1][0])
    assert runs[1][1].offloaded_bytes == runs[0][1].offloaded_bytes > 0
    assert stage.streamer.traffic.overflow_bytes == 0
    stage.streamer.remove()


class Looked(torch.autograd.Function):
    """Has a late accelerator look at a weight, in the forward and again in the backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, link: LateLink, expected: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.link, ctx.expected = link, expected
        link.launch(weight, expected)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.link.launch(ctx.saved_tensors[0], ctx.expected)
        return gradient, None, None, None


class Looking(nn.Module):
    def __init__(self, link: LateLink, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.link, self.expected = link, self.weight.detach().clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if is_fake(self.weight) else Looked.apply(x, self.weight, self.link, self.expected)


@pytest.mark.parametrize(("pauses", "where"), in_turn([(0.002, 0.0), (0.0, 0.005)], ["cpu", "disk"]))
def test_a_backward_keeps_the_order_of_a_late_accelerator(where: str, pauses: tuple[float, float], tmp_path) -> None:
    link = LateLink(copy_pause=pauses[0], compute_pause=pauses[1])
    model = nn.Sequential(*(Looking(link, 3000 + 1000 * (place % 3)) for place in range(10))).requires_grad_(False)
    stage = Setup(model, lambda _name: where, tmp_path, open_link=lambda _devices, _device: link)
    for _ in range(4):
        model(X.clone().requires_grad_()).sum().backward()
    assert stage.streamer.traffic.overflow_bytes == 0
    stage.streamer.remove()
    link.end()
    assert link.wrong == []


def test_tokens_that_follow_a_training_step_are_the_same(tmp_path: Path) -> None:
    plain, model = adapted_llama(), adapted_llama()
    stage = on_stage(model, "disk", tmp_path, staging_bytes=STAGING)
    for each in (plain, model):
        trained(each, 2)
    with torch.no_grad():
        assert all(torch.equal(model(TOKENS).logits, plain(TOKENS).logits) for _ in range(3))
    stage.streamer.remove()
