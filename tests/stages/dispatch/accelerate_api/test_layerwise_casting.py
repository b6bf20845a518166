from __future__ import annotations

import pytest
import torch
from torch import nn

from offstage.stages.dispatch import (
    AlignDevicesHook,
    LayerwiseCastingHook,
    add_hook_to_module,
    attach_layerwise_casting_hooks,
    remove_hook_from_submodules,
)

FP8, HALF, FULL = torch.float8_e4m3fn, torch.float16, torch.float32


def model() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Sequential(nn.Conv1d(3, 3, 1)))


def dtypes(module: nn.Module) -> dict[str, torch.dtype]:
    return {name: parameter.dtype for name, parameter in module.named_parameters() if name.endswith("weight")}


def test_linear_layers_and_convolutions_rest_in_the_storage_dtype() -> None:
    module = model()
    weight = module[1].weight
    attach_layerwise_casting_hooks(module, storage_dtype=FP8, compute_dtype=FULL)
    assert dtypes(module) == {"0.weight": FULL, "1.weight": FP8, "2.weight": FULL, "3.0.weight": FP8}
    assert module[1].weight is weight


@pytest.mark.parametrize(
    ("options", "stored"),
    [
        ({"skip_modules_pattern": r"^3"}, ["1.weight"]),
        ({"skip_modules_pattern": [r"\.0$", "none"]}, ["1.weight"]),
        ({"skip_modules_classes": (nn.Linear,)}, ["3.0.weight"]),
        ({"skip_modules_pattern": "1", "skip_modules_classes": (nn.Sequential,)}, []),
    ],
)
def test_what_is_skipped_keeps_its_dtype(options: dict, stored: list[str]) -> None:
    module = model()
    attach_layerwise_casting_hooks(module, FP8, FULL, **options)
    assert [name for name, dtype in dtypes(module).items() if dtype == FP8] == stored


def test_the_call_computes_with_the_weights_cast_and_keeps_no_copy() -> None:
    linear = nn.Linear(4, 4)
    expected = nn.Linear(4, 4)
    expected.load_state_dict({name: tensor.to(FP8).float() for name, tensor in linear.state_dict().items()})
    attach_layerwise_casting_hooks(linear, FP8, FULL)
    seen = []
    linear.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    assert torch.equal(linear(torch.eye(4)), expected(torch.eye(4)))
    assert (seen, linear.weight.dtype) == ([FULL], FP8)
    remove_hook_from_submodules(linear)
    assert linear.weight.dtype == FP8


def test_gradients_reach_the_stored_weights() -> None:
    linear = nn.Linear(4, 4)
    attach_layerwise_casting_hooks(linear, HALF, FULL)
    linear(torch.ones(2, 4)).sum().backward()
    assert torch.equal(linear.weight.grad, torch.full((4, 4), 2.0).half())


def test_a_call_that_raises_leaves_the_stored_weights() -> None:
    linear = nn.Linear(4, 4)
    attach_layerwise_casting_hooks(linear, HALF, FULL)
    with pytest.raises(RuntimeError):
        linear(torch.ones(2, 5))
    assert linear.weight.dtype == HALF
    assert linear(torch.ones(2, 4)).dtype == FULL


@pytest.mark.parametrize("casting_first", [True, False])
def test_it_goes_with_offloading(casting_first: bool) -> None:
    linear = nn.Linear(4, 4)
    value = linear.weight.detach().clone()
    hooks = [LayerwiseCastingHook(HALF, FULL, False), AlignDevicesHook("cpu", offload=True)]
    for hook in hooks if casting_first else reversed(hooks):
        add_hook_to_module(linear, hook, append=True)
    stored = value.half().float() if casting_first else value
    for _ in range(2):
        assert torch.equal(linear(torch.eye(4)) - linear.bias.float(), torch.nn.functional.linear(torch.eye(4), stored))
        assert linear.weight.is_meta
