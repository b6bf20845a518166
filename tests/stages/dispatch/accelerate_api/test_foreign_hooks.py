"""Models that accelerate dispatched, and hooks of its classes: ours meet them where a library in between uses it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from offstage.stages.dispatch import (
    AlignDevicesHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)

accelerate = pytest.importorskip("accelerate")
INPUT = torch.ones(3, 2)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()


def test_a_model_that_accelerate_dispatched_is_what_it_was_after_removal(tmp_path: Path) -> None:
    expected = model()(INPUT)
    dispatched = accelerate.dispatch_model(model(), {"0": "cpu", "1": "cpu", "2": "disk"}, offload_dir=str(tmp_path))
    assert dispatched[2].weight.is_meta
    remove_hook_from_submodules(dispatched)
    assert torch.equal(dispatched(INPUT), expected)
    assert not any(hasattr(module, name) for module in dispatched.modules() for name in ("_hf_hook", "_old_forward"))
    assert not {"to", "cuda"} & set(vars(dispatched))
    assert dispatched.to(torch.float64)[2].weight.dtype == torch.float64


def test_a_traced_graph_gets_its_forward_back() -> None:
    traced = torch.fx.symbolic_trace(model())
    expected = traced(INPUT)
    accelerate.hooks.add_hook_to_module(traced, accelerate.hooks.ModelHook())
    assert torch.equal(remove_hook_from_module(traced)(INPUT), expected)


class AddOne(ModelHook):
    def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
        return output + 1


@pytest.mark.parametrize("append", [True, False])
def test_a_hook_of_ours_is_added_to_one_of_accelerates(append: bool) -> None:
    module = model()
    expected = module(INPUT)
    accelerate.hooks.add_hook_to_module(module, accelerate.hooks.AlignDevicesHook("cpu", io_same_device=True))
    add_hook_to_module(module, AddOne(), append=append)
    assert torch.equal(module(INPUT), expected + 1)
    assert isinstance(module._hf_hook, SequentialHook if append else AddOne)
    with pytest.raises(RuntimeError):
        module(torch.ones(3, 5))
    remove_hook_from_module(module)
    assert torch.equal(module(INPUT), expected)


def test_a_model_that_accelerates_function_took_our_hook_from_can_be_called() -> None:
    module = model()
    expected = module(INPUT)
    add_hook_to_module(module, AlignDevicesHook("cpu", offload=True, place_submodules=True))
    accelerate.hooks.remove_hook_from_submodules(module)
    assert torch.equal(module(INPUT), expected)
