import pytest
import torch
from torch import nn
from torch.func import functional_call

from offstage.stages.dispatch import OffloadBudget, maybe_offload_to_cpu, remove_hook_from_module
from tests.stages.dispatch.models_to_offload import Net, Tied, anatomy, same_anatomy, seeded

X = torch.randn(2, 3)
CPU = torch.device("cpu")


def offloaded(model: nn.Module) -> list[str]:
    """Return the names of the parameters that the hook of ``model`` keeps on the host."""
    chosen = {id(parameter) for parameter in model._hf_hook._chosen}
    return [name for name, parameter in model.named_parameters(remove_duplicate=False) if id(parameter) in chosen]


@pytest.mark.parametrize(
    ("max_bytes", "names"),
    [
        (1, ["linear1.weight"]),
        (48, ["linear1.weight"]),
        (49, ["linear1.weight", "linear1.bias"]),
        (64, ["linear1.weight", "linear1.bias"]),
        (65, ["linear1.weight", "linear1.bias", "batchnorm.weight"]),
        (10**9, [f"{name}.{kind}" for name in ("linear1", "batchnorm", "linear2") for kind in ("weight", "bias")]),
    ],
)
def test_parameters_go_in_order_until_the_budget_is_spent(max_bytes: int, names: list[str]) -> None:
    model = maybe_offload_to_cpu(seeded(Net), max_bytes, device=CPU)
    assert offloaded(model) == names


def test_modules_share_one_budget() -> None:
    budget = OffloadBudget(100)
    layers = [maybe_offload_to_cpu(nn.Linear(3, 4), budget, device=CPU) for _ in range(3)]
    assert [hasattr(layer, "_hf_hook") for layer in layers] == [True, True, False]
    assert offloaded(layers[1]) == ["weight"], "64 bytes went to the first layer, and 48 cross the limit"
    assert budget.used_bytes == 112
    assert budget.is_spent


@pytest.mark.parametrize("model", [seeded(Net).requires_grad_(False), nn.ReLU()])
def test_what_is_on_the_host_already_is_left_alone(model: nn.Module) -> None:
    before, budget = anatomy(model), OffloadBudget(10**9)
    assert maybe_offload_to_cpu(model, budget) is model
    assert same_anatomy(before, anatomy(model))
    assert budget.used_bytes == 0


def test_a_call_is_a_functional_call_with_the_parameters_on_the_device() -> None:
    model, tokens = seeded(Tied), torch.tensor([[1, 2]])
    expected = functional_call(model, dict(model.named_parameters()), (tokens,))
    parameters, seen = dict(model.named_parameters(remove_duplicate=False)), list[bool]()
    maybe_offload_to_cpu(model, 10**9, device=CPU)
    model.middle.register_forward_pre_hook(lambda _m, _a: seen.append(model.head.weight is model.embed.weight))
    model.middle.register_forward_pre_hook(lambda _m, _a: seen.append(model.head.weight is parameters["head.weight"]))
    assert torch.equal(model(tokens), expected)
    assert seen == [True, False], "tied during the call, and not the parameters of the host"
    assert all(parameters[name] is p for name, p in model.named_parameters(remove_duplicate=False))


def test_an_exception_leaves_the_parameters_on_the_host_and_the_model_callable() -> None:
    model = seeded(Net)
    expected, parameters = model(X), dict(model.named_parameters())
    maybe_offload_to_cpu(model, 10**9, device=CPU)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(2, 9))
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert torch.equal(model(X), expected)
    remove_hook_from_module(model)
    assert torch.equal(model(X), expected)
