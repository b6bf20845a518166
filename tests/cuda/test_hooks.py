"""Hooks and whole-model calls with a real accelerator: the same answers, and nothing left on it between calls."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offstage.stages.dispatch import (
    AlignDevicesHook,
    OffloadBudget,
    add_hook_to_module,
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    maybe_offload_to_cpu,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from tests.stages.dispatch.models_to_offload import Borrower, Net, Tied, seeded, waiting

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
]

X = torch.randn(2, 3)
TOKENS = torch.tensor([[1, 2, 3]])
two_accelerators = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two accelerators")


def resident(kind: Any, *args: Any, x: torch.Tensor = X) -> torch.Tensor:
    """Return what the model answers with all its weights on the accelerator."""
    return seeded(kind, *args).to("cuda:0")(x.to("cuda:0"))


def test_a_model_on_the_host_computes_on_the_accelerator() -> None:
    model = cpu_offload(seeded(Net), execution_device=0)
    assert model(X).device == X.device, "the output is where the input was"
    assert torch.equal(model(X.to("cuda:0")), resident(Net))
    assert waiting(model)
    remove_hook_from_submodules(model)
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}


def test_a_model_on_disk_computes_on_the_accelerator_and_comes_back_to_it(tmp_path: Path) -> None:
    model = disk_offload(seeded(Net).to("cuda:0"), tmp_path)
    assert torch.equal(model(X.to("cuda:0")), resident(Net))
    remove_hook_from_submodules(model)
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"cuda"}


@pytest.mark.parametrize(
    "device_map",
    [
        {"linear1": 0, "batchnorm": "cpu", "linear2": "disk"},
        {"": "cpu", "linear2": "cuda:0"},
        {"linear1.weight": "cpu", "linear1.bias": 0, "batchnorm": 0, "linear2": "disk"},
    ],
)
def test_a_mapped_model_answers_like_a_resident_one(device_map: Any, tmp_path: Path) -> None:
    model = dispatch_model(seeded(Net), device_map, offload_dir=tmp_path)
    assert torch.equal(model(X.to("cuda:0")), resident(Net))
    assert torch.equal(model(X), resident(Net).cpu())
    remove_hook_from_submodules(model)
    assert torch.equal(model.to("cuda:0")(X.to("cuda:0")), resident(Net))


def test_tied_and_borrowed_weights_are_right(tmp_path: Path) -> None:
    model = dispatch_model(seeded(Tied), {"embed": 0, "middle": "cpu", "head": "cpu"})
    assert torch.equal(model(TOKENS.to("cuda:0")), resident(Tied, x=TOKENS))
    assert model.head.weight is model.embed.weight
    model = disk_offload(seeded(Borrower, 3, 4), tmp_path, execution_device=0)
    with torch.no_grad():
        expected = resident(Borrower, 3, 4)
        add_hook_to_module(model.linear, AlignDevicesHook(0), append=True)
        assert torch.equal(model(X.to("cuda:0")), expected)


def test_nothing_stays_on_the_accelerator_between_calls_or_after_an_exception() -> None:
    model = cpu_offload(nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))), execution_device=0)
    x = torch.randn(2, 512, device="cuda:0")
    with torch.no_grad():
        model(x)
        allocated = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(x)
        assert torch.cuda.memory_allocated() == allocated
        assert torch.cuda.max_memory_allocated() - allocated < 2 * 513 * 512 * 4, "one layer at a time"
        with pytest.raises(RuntimeError):
            model(x[:, :5])
    assert torch.cuda.memory_allocated() <= allocated


def test_models_take_turns_on_the_accelerator() -> None:
    first, hook_1 = cpu_offload_with_hook(nn.Linear(3, 3))
    second, hook_2 = cpu_offload_with_hook(nn.Linear(3, 3), prev_module_hook=hook_1)
    hidden = first(X)
    assert (hidden.device.type, first.weight.device.type) == ("cuda", "cuda")
    for _ in range(2):
        second(hidden)
        assert (first.weight.device.type, second.weight.device.type) == ("cpu", "cuda")
    hook_2.offload()
    assert second.weight.device.type == "cpu"


def test_a_byte_budget_of_weights_lies_on_the_host() -> None:
    model, budget = seeded(Net).to("cuda:0"), OffloadBudget(60)
    maybe_offload_to_cpu(model, budget)
    assert [p.device.type for p in model.parameters()] == ["cpu"] * 2 + ["cuda"] * 4
    assert torch.equal(model(X.to("cuda:0")), resident(Net))
    assert model.linear1.weight.device.type == "cpu"
    assert model.linear1.weight.is_pinned()
    remove_hook_from_module(model)
    assert {p.device.type for p in model.parameters()} == {"cuda"}


@two_accelerators
def test_blocks_on_two_accelerators() -> None:
    model = dispatch_model(seeded(Net), {"linear1": 1, "batchnorm": 0, "linear2": "cpu"})
    assert model.hf_device_map["linear1"] == 1
    assert waiting(model) == {"linear2.weight", "linear2.bias"}
    torch.testing.assert_close(model(X), seeded(Net)(X))
    assert model._hf_hook.execution_device == 1, "the first accelerator of the map"
