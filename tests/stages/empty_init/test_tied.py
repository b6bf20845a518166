import pytest
import torch
from torch import nn

from offstage.stages.empty_init import (
    check_tied_parameters_on_same_device,
    find_tied_parameters,
    init_empty_weights,
    named_module_tensors,
    retie_parameters,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)


def test_a_model_without_ties_has_none() -> None:
    assert find_tied_parameters(Block()) == []


def test_a_parameter_bound_in_two_modules_is_found() -> None:
    model = nn.ModuleDict({"b": Block(), "a": Block()})
    model["b"].first.weight = model["a"].second.weight
    model["b"].second.bias = model["b"].first.bias
    assert find_tied_parameters(model) == [["a.second.weight", "b.first.weight"], ["b.first.bias", "b.second.bias"]]


def test_a_submodule_bound_under_two_names_is_found() -> None:
    model = nn.Module()
    model.left = Block()
    model.right = model.left
    assert find_tied_parameters(model)[0] == ["left.first.bias", "right.first.bias"]
    assert len(find_tied_parameters(model)) == 4


def test_ties_inside_one_module_and_with_a_child_are_found() -> None:
    model = nn.Module()
    model.child = nn.Linear(2, 2, bias=False)
    model.own = model.child.weight
    model.same = model.own
    assert find_tied_parameters(model) == [["child.weight", "own", "same"]]


def test_ties_on_meta_are_found() -> None:
    with init_empty_weights():
        model = Block()
        model.second.weight = model.first.weight
    assert find_tied_parameters(model) == [["first.weight", "second.weight"]]


def test_equal_values_are_no_tie() -> None:
    model = Block()
    model.second.load_state_dict(model.first.state_dict())
    assert find_tied_parameters(model) == []


def test_retying_binds_the_one_that_holds_data_everywhere() -> None:
    with init_empty_weights():
        model = Block()
    groups = [["first.weight", "second.weight"]]
    model.second.weight = nn.Parameter(torch.ones(2, 2))
    retie_parameters(model, groups)
    assert model.first.weight is model.second.weight
    assert torch.equal(model.first.weight, torch.ones(2, 2))
    assert find_tied_parameters(model) == groups


def test_named_module_tensors_lists_parameters_then_buffers() -> None:
    module = nn.BatchNorm1d(2)
    module.register_buffer("hidden", torch.zeros(1), persistent=False)
    names = [name for name, _ in named_module_tensors(module)]
    assert names == ["weight", "bias", "running_mean", "running_var", "num_batches_tracked", "hidden"]
    assert [n for n, _ in named_module_tensors(module, include_buffers=False)] == ["weight", "bias"]
    assert "hidden" not in dict(named_module_tensors(module, remove_non_persistent=True))
    nested = nn.Sequential(module)
    assert dict(named_module_tensors(nested)) == {}
    assert "0.hidden" in dict(named_module_tensors(nested, recurse=True))
    assert "0.hidden" not in dict(named_module_tensors(nested, recurse=True, remove_non_persistent=True))


def test_twins_on_two_devices_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    group = [["embed.weight", "head.weight"]]
    check_tied_parameters_on_same_device(group, {"": 0})
    check_tied_parameters_on_same_device(group, {"embed": 0})
    assert not caplog.text
    check_tied_parameters_on_same_device(group, {"embed": 0, "": "cpu"})
    assert "'embed.weight': 0, 'head.weight': 'cpu'" in caplog.text
    with pytest.raises(ValueError, match=r"leaves out 'embed\.weight'"):
        check_tied_parameters_on_same_device(group, {"norm": 0})
