import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from offstage.stages.dispatch.streaming.waiting_tensor import WaitingSource, WaitingTensor
from offstage.stages.shard_load.sources import DiskWeights
from tests.stages.dispatch.models_to_offload import Transformer, seeded

CPU = torch.device("cpu")
X = torch.randn(2, 4)


def wait(tensor: torch.Tensor) -> WaitingTensor:
    return WaitingTensor(tensor, WaitingSource({"w": tensor.detach()}, "w", CPU))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("shape", "use"),
    [
        ((4, 4), lambda w: functional.linear(X, w)),
        ((4, 4), lambda w: functional.linear(X[None], w, w[0])),
        ((4, 4), lambda w: X @ w.t() + w[1]),
        ((4, 4), lambda w: X @ w.T),
        ((4, 4), lambda w: X @ w.data),
        ((4, 4), lambda w: X @ w.detach()),
        ((4, 4), lambda w: X @ w.to(torch.float32).reshape(4, 4)),
        ((4, 4), lambda w: torch.einsum("ab,cb->ac", X, w)),
        ((9, 4), lambda w: functional.embedding(torch.tensor([1, 8]), w)),
        ((4,), lambda w: functional.layer_norm(X, (4,), w, w)),
        ((3, 2, 2), lambda w: functional.conv1d(X[None], w)),
        ((4, 4), lambda w: torch.cat([w, X])),
        ((4, 4), lambda w: w.sum()),
        ((4, 4), lambda w: 2 * w),
    ],
)
def test_operators_get_the_data(shape: tuple[int, ...], use: Any, grad: bool) -> None:
    weight = nn.Parameter(torch.randn(shape))
    with torch.set_grad_enabled(grad):
        assert torch.equal(use(wait(weight)), use(weight))


def test_it_is_a_parameter_on_meta_to_whoever_asks() -> None:
    weight = nn.Parameter(torch.randn(3, 4, dtype=torch.bfloat16), requires_grad=False)
    waiting = wait(weight)
    assert isinstance(waiting, nn.Parameter)
    assert not isinstance(wait(weight.data), nn.Parameter)
    assert (waiting.device.type, waiting.shape, waiting.dtype) == ("meta", weight.shape, torch.bfloat16)
    assert not waiting.requires_grad
    assert "WaitingTensor(name='w', shape=(3, 4)" in repr(waiting)


@pytest.mark.parametrize("index", [[2, 0], ([1], slice(2)), np.array([2, 0]), [True, False, True], True, (0, [1])])
def test_an_index_that_is_no_tensor_gets_the_data(index: Any) -> None:
    weight = nn.Parameter(torch.randn(3, 3))
    assert torch.equal(wait(weight)[index], weight[index])


def test_a_state_dict_and_a_copy_read_nothing() -> None:
    class Unreadable(dict[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            raise OSError("read")

    layer = nn.Linear(2, 2)
    layer.weight = WaitingTensor(layer.weight, WaitingSource(Unreadable(), "w", CPU))
    assert layer.state_dict()["weight"].is_meta
    assert copy.deepcopy(layer).weight.is_meta
    assert layer.weight.to("meta").is_meta
    with pytest.raises(OSError, match="read"):
        layer(torch.zeros(1, 2))


@pytest.mark.parametrize("values", [torch.Tensor.numpy, np.asarray, torch.Tensor.tolist])
def test_its_values_are_taken_out_of_torch_as_those_of_any_tensor(values: Any) -> None:
    weight = nn.Parameter(torch.randn(2, 2), requires_grad=False)
    assert np.array_equal(values(wait(weight)), values(weight))
    assert np.array_equal(values(wait(weight)[0]), values(weight[0]))


def test_a_parameter_that_learns_has_to_be_detached_to_be_an_array_which_is_read_only() -> None:
    weight = wait(nn.Parameter(torch.randn(2, 2)))
    with pytest.raises(RuntimeError, match=r"Use tensor.detach\(\).numpy\(\)"):
        weight.numpy()
    array = weight.detach().numpy()
    assert np.array_equal(array, weight.numpy(force=True))
    with pytest.raises(ValueError, match="read-only"):
        array[:] = 0


def test_a_change_that_would_be_lost_is_refused() -> None:
    weight = wait(nn.Parameter(torch.randn(2, 2)))
    with torch.no_grad():
        for change in (lambda: weight.zero_(), lambda: weight.copy_(X[:, :2]), lambda: torch.add(X, X, out=weight)):
            with pytest.raises(RuntimeError, match="'w' is offloaded, and a change by aten"):
                change()


def test_autocast_sees_the_data() -> None:
    layer = nn.Linear(4, 4)
    with torch.autocast("cpu"):
        expected = layer(X)
        assert expected.dtype == torch.bfloat16
        assert torch.equal(functional.linear(X, wait(layer.weight), wait(layer.bias)), expected)


def test_a_waiting_tensor_is_copied_once_with_what_it_waits_in() -> None:
    weight = wait(nn.Parameter(torch.randn(2, 2)))
    one, other, source = copy.deepcopy([weight, weight, weight.source])
    assert one is other
    assert one.source is source
    assert source.weights["w"] is not weight.source.weights["w"]
    assert isinstance(one, nn.Parameter)


@pytest.mark.parametrize("grad", [False, True])
def test_the_encoder_of_torch_works_with_every_weight_waiting(grad: bool) -> None:
    x = torch.randn(1, 5, 8)
    with torch.set_grad_enabled(grad):
        model = seeded(Transformer)
        expected = model(x)
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                module._parameters[name] = wait(parameter)
        torch.testing.assert_close(model(x), expected)  # without gradients it leaves torch's fused path


@pytest.mark.parametrize("reported", [None, CPU])
def test_a_pickle_of_it_has_its_data_and_nothing_of_ours(reported: torch.device | None) -> None:
    weight = nn.Parameter(torch.randn(2, 2))
    data = pickle.dumps(WaitingTensor(weight, WaitingSource({"w": weight}, "w", CPU, reported=reported)))
    assert b"offstage" not in data
    twin = pickle.loads(data)  # noqa: S301
    assert type(twin) is nn.Parameter
    assert torch.equal(twin, weight)


def test_one_that_the_host_has_no_room_for_is_neither_pickled_nor_lent_an_address() -> None:
    huge = torch.empty(1 << 50, device="meta")
    waiting = WaitingTensor(huge, WaitingSource(DiskWeights({}), "w", CPU, reported=CPU))
    for use in (pickle.dumps, torch.Tensor.data_ptr):
        with pytest.raises(
            RuntimeError, match=r"'w' is offloaded, and its \d+ bytes don't fit .* free: save the model"
        ):
            use(waiting)


def test_an_entry_of_a_state_dict_has_an_address_and_a_parameter_none() -> None:
    weight = nn.Parameter(torch.randn(2, 2))
    waiting = WaitingTensor(weight, WaitingSource({"w": weight}, "w", CPU, reported=CPU))
    assert waiting.detach().data_ptr() == weight.data_ptr()
    with pytest.raises(RuntimeError, match="'w' is offloaded, and has no address in memory: save the model"):
        waiting.data_ptr()
