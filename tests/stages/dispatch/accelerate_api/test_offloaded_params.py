from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from offstage.stages.dispatch import (
    AlignDevicesHook,
    add_hook_to_module,
    align_module_device,
    attach_align_device_hook,
    get_state_dict_from_offload,
    get_state_dict_offloaded_model,
    has_offloaded_params,
)
from offstage.stages.shard_load import OffloadedWeightsLoader, offload_state_dict
from tests.stages.shard_load.checkpoints import assert_same

META = torch.device("meta")


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def offloaded(folder: Path) -> nn.Sequential:
    """Return a model whose weights wait on disk, its buffers on the cpu."""
    model = small()
    offload_state_dict(folder, model.state_dict())
    attach_align_device_hook(model, torch.device("cpu"), True, OffloadedWeightsLoader(save_folder=folder))
    return model


def test_only_a_module_whose_own_weights_wait_has_offloaded_params(tmp_path: Path) -> None:
    model = offloaded(tmp_path)
    assert [has_offloaded_params(module) for module in (model, model[0], model[1], nn.Linear(1, 1))] == [
        False,
        True,
        True,
        False,
    ]
    add_hook_to_module(model[0], AlignDevicesHook("cpu"), append=True)
    assert has_offloaded_params(model[0])


def test_a_module_brought_in_as_a_whole_has_those_of_its_submodules() -> None:
    model = small()
    add_hook_to_module(model, AlignDevicesHook("cpu", offload=True, place_submodules=True))
    weight = model[0].weight
    assert has_offloaded_params(model)
    with align_module_device(model):
        assert model[0].weight.device == torch.device("cpu")
    assert model[0].weight is weight


@pytest.mark.parametrize("device", [None, "cpu", torch.device("meta")])
def test_offloaded_weights_are_on_the_device_inside_the_context(tmp_path: Path, device: object) -> None:
    model = offloaded(tmp_path)
    with align_module_device(model[0], device):
        assert model[0].weight.device == torch.device(device or "cpu")
        assert model[2].weight.device == META
    assert model[0].weight.device == META
    assert model(torch.ones(4, 2)).shape == (4, 2)


def test_weights_that_do_not_wait_move_there_and_back_with_what_was_written() -> None:
    module = nn.Linear(2, 2)
    weight, bias = module.weight, module.bias
    with align_module_device(module, "meta"):
        assert module.weight.device == META
        module.bias = nn.Parameter(torch.zeros(2))
    assert module.weight is weight
    assert module.bias is not bias
    with align_module_device(module, "cpu"):
        module.weight.data.fill_(7.0)
    assert torch.equal(weight, torch.full((2, 2), 7.0))


def test_an_exception_inside_the_context_brings_the_weights_back(tmp_path: Path) -> None:
    model = offloaded(tmp_path)

    def fail() -> None:
        with align_module_device(model[0]):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert model[0].weight.device == META


def test_the_whole_state_dict_is_read_tied_weights_once(tmp_path: Path) -> None:
    model = small()
    model[2].weight = nn.Parameter(model[0].weight.detach().t().contiguous())
    model.append(nn.Linear(3, 2, bias=False))
    model[3].weight = model[2].weight
    model.scale = nn.Parameter(torch.ones(1))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    offload_state_dict(tmp_path, expected)
    attach_align_device_hook(model, torch.device("cpu"), True, OffloadedWeightsLoader(save_folder=tmp_path))
    state = get_state_dict_offloaded_model(model)
    assert_same(state, expected)
    assert state["2.weight"] is state["3.weight"]


def test_what_waits_nowhere_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = small()
    model[2].to("meta")
    assert {name.partition(".")[0] for name in get_state_dict_offloaded_model(model)} == {"0", "1"}
    assert "they are on the meta device: '2.weight', '2.bias'" in caplog.text


def test_entries_of_a_state_dict_are_read_from_where_they_wait(tmp_path: Path) -> None:
    model = offloaded(tmp_path)
    expected = OffloadedWeightsLoader(save_folder=tmp_path)
    state = dict.fromkeys(["0.weight", "2.weight"])
    assert get_state_dict_from_offload(model[0], "0.weight", state) is state
    assert torch.equal(state["0.weight"], expected["0.weight"])
    assert state["2.weight"] is None
    alone = nn.Linear(2, 2)
    assert torch.equal(get_state_dict_from_offload(alone, "weight", {"weight": None}, "meta")["weight"], alone.weight)
