import threading

import pytest
import torch
from torch import nn

from offstage.stages.empty_init import init_empty_weights, init_on_device


class WithTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("table", torch.arange(5.0), persistent=False)
        self.register_buffer("nothing", None)
        self.register_parameter("absent", None)


def test_parameters_go_to_meta_and_buffers_keep_their_values() -> None:
    with init_empty_weights():
        model = WithTable()
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert torch.equal(model.table, torch.arange(5.0))
    assert model.absent is None
    assert model.nothing is None


def test_buffers_go_along_when_asked() -> None:
    with init_empty_weights(include_buffers=True):
        model = WithTable()
    assert model.table.device.type == "meta"
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_shape_dtype_and_requires_grad_stay() -> None:
    with init_empty_weights():
        module = nn.Module()
        module.weight = nn.Parameter(torch.zeros(3, 2, dtype=torch.float16), requires_grad=False)
    assert module.weight.shape == (3, 2)
    assert module.weight.dtype == torch.float16
    assert not module.weight.requires_grad


def test_a_subclass_and_its_attributes_stay() -> None:
    class Marked(nn.Parameter):
        pass

    with init_empty_weights():
        module = nn.Module()
        parameter = Marked(torch.zeros(2))
        parameter.mark = "kept"
        module.weight = parameter
    assert type(module.weight) is Marked
    assert module.weight.mark == "kept"
    assert module.weight.device.type == "meta"


def test_one_parameter_assigned_twice_stays_one() -> None:
    with init_empty_weights():
        shared, module = nn.Parameter(torch.zeros(2)), nn.Module()
        module.first, module.second = shared, shared
    assert module.first is module.second


def test_a_tie_made_inside_the_context_stays() -> None:
    with init_empty_weights():
        a, b = nn.Linear(3, 3), nn.Linear(3, 3)
        b.weight = a.weight
    assert a.weight is b.weight


def test_nothing_is_sent_away_after_the_context_even_when_it_raised() -> None:
    with pytest.raises(RuntimeError), init_empty_weights():
        raise RuntimeError
    assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_modules_of_other_threads_are_left_alone() -> None:
    made: list[nn.Module] = []
    with init_empty_weights():
        thread = threading.Thread(target=lambda: made.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
    assert made[0].weight.device.type == "cpu"


def test_any_device_can_be_asked_for() -> None:
    with init_on_device("cpu"):
        assert nn.Linear(2, 2).weight.device.type == "cpu"
    with init_on_device(torch.device("meta"), include_buffers=False):
        assert nn.Linear(2, 2).weight.device.type == "meta"


def test_a_model_far_larger_than_the_machine_is_built() -> None:
    with init_empty_weights():
        model = nn.Sequential(*(nn.Linear(100_000, 100_000, bias=False) for _ in range(100)))
    assert sum(p.nbytes for p in model.parameters()) == 4 * 10**12
