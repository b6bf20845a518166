import copy
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from offstage.stages.dispatch import (
    AlignDevicesHook,
    ModelHook,
    add_hook_to_module,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from offstage.stages.dispatch.accelerate_api.align import resolve_device
from tests.stages.dispatch.models_to_offload import Borrower, Net, Tied, anatomy, same_anatomy, seeded, waiting

X = torch.randn(2, 3)
META = torch.device("meta")
PARAMETERS = {f"{name}.{kind}" for name in ("linear1", "batchnorm", "linear2") for kind in ("weight", "bias")}
STATISTICS = {f"batchnorm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}


class Shelf(Mapping[str, torch.Tensor]):
    """Weights that are read at each access, counted, and may fail to come."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.weights = {name: tensor.detach().clone() for name, tensor in weights.items()}
        self.reads, self.broken = list[str](), set[str]()

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self.broken:
            raise OSError(f"{name} can't be read")
        self.reads.append(name)
        return self.weights[name].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


def offloaded(model: nn.Module, **options: Any) -> nn.Module:
    attach_align_device_hook(model, execution_device=torch.device("cpu"), offload=True, **options)
    return model


@pytest.mark.parametrize(("buffers", "away"), [(False, PARAMETERS), (True, PARAMETERS | STATISTICS)])
def test_offloaded_weights_are_there_during_calls_only(buffers: bool, away: set[str]) -> None:
    expected, model = seeded(Net)(X), offloaded(seeded(Net), offload_buffers=buffers)
    assert waiting(model) == away
    seen = list[set[str]]()
    model.linear2.register_forward_pre_hook(lambda _m, _a: seen.append(waiting(model)))
    assert torch.equal(model(X), expected)
    assert seen == [away - {"linear2.weight", "linear2.bias"}]
    assert waiting(model) == away
    assert torch.equal(model(X), expected)


def test_after_removal_the_parameters_are_the_same_objects() -> None:
    model = seeded(Tied)
    before, weight = anatomy(model), model.embed.weight
    offloaded(model)
    model(torch.tensor([[1, 2]]))
    remove_hook_from_submodules(model)
    assert same_anatomy(before, anatomy(model))
    assert model.embed.weight is weight is model.head.weight


def test_weights_from_a_map_come_back_from_it_and_stay_tied() -> None:
    model = seeded(Tied)
    values = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    shelf = Shelf(values)
    offloaded(model, weights_map=shelf)
    assert model.embed.weight is model.head.weight, "tied while they wait, too"
    assert not shelf.reads
    remove_hook_from_submodules(model)
    assert model.embed.weight is model.head.weight
    assert isinstance(model.embed.weight, nn.Parameter)
    assert type(model.embed.weight) is nn.Parameter
    assert all(torch.equal(tensor, values[name]) for name, tensor in model.state_dict().items())


def test_a_weight_that_had_no_data_has_none_after_removal() -> None:
    shelf, model = Shelf(seeded(Net).state_dict()), seeded(Net).to("meta")
    before = anatomy(model)
    for buffer in ("running_mean", "running_var", "num_batches_tracked"):
        model.batchnorm._buffers[buffer] = shelf[f"batchnorm.{buffer}"]
    offloaded(model, weights_map=shelf)
    assert torch.equal(model(X), seeded(Net)(X))
    remove_hook_from_submodules(model)
    assert waiting(model) == PARAMETERS
    assert anatomy(model)["linear1:_parameters"]["weight"] is before["linear1:_parameters"]["weight"]


def test_a_meta_tensor_that_nothing_is_known_of_is_refused() -> None:
    with pytest.raises(ValueError, match="'weight' is on the meta device and has no data"):
        add_hook_to_module(nn.Linear(2, 2, device="meta"), AlignDevicesHook(execution_device="cpu"))


def test_a_parent_that_reads_its_childs_weight_gets_the_weight() -> None:
    expected, model = seeded(Borrower, 3, 4)(X), offloaded(seeded(Borrower, 3, 4))
    assert torch.equal(model(X), expected)
    assert waiting(model) == {"linear.weight", "linear.bias"}


def test_preloaded_classes_come_in_as_a_whole() -> None:
    model = nn.Sequential(seeded(Borrower, 3, 4), seeded(Borrower, 4, 2))
    expected = model(X)
    shelf = Shelf(model.state_dict())
    offloaded(model, weights_map=shelf, preload_module_classes=["Borrower"])
    assert [hasattr(m, "_hf_hook") for _, m in model.named_modules()] == [False, True, False, True, False]
    assert torch.equal(model(X), expected)
    assert shelf.reads == ["0.linear.weight", "0.linear.bias", "1.linear.weight", "1.linear.bias"]


def test_an_exception_in_a_forward_leaves_nothing_onloaded() -> None:
    expected, model = seeded(Net)(X), offloaded(seeded(Net))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(2, 9))
    assert waiting(model) == PARAMETERS
    assert torch.equal(model(X), expected)


def test_a_read_that_fails_surfaces_in_the_forward_and_leaves_nothing_onloaded() -> None:
    model = seeded(Net)
    expected, shelf = model(X), Shelf(model.state_dict())
    offloaded(model, weights_map=shelf)
    shelf.broken = {"linear2.bias"}
    with pytest.raises(OSError, match=r"linear2\.bias can't be read"):
        model(X)
    assert waiting(model) == PARAMETERS
    shelf.broken = set()
    assert torch.equal(model(X), expected)


def test_an_interrupted_call_is_tidied_up_by_the_next() -> None:
    def interrupt(_x: torch.Tensor) -> None:
        raise KeyboardInterrupt  # for which torch calls no hooks

    expected, model = seeded(Net)(X), offloaded(seeded(Net))
    model.linear1.forward = interrupt
    with pytest.raises(KeyboardInterrupt):
        model(X)
    del model.linear1.forward
    assert torch.equal(model(X), expected)
    assert waiting(model) == PARAMETERS


class Twice(nn.Module):
    """Calls itself once more from inside, then goes on using its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: torch.Tensor, again: bool = True) -> torch.Tensor:
        inner = self(x, again=False) if again else x
        return inner @ self.weight


def test_a_module_that_calls_itself_gets_its_weight_to_the_end() -> None:
    expected, model = seeded(Twice)(X), offloaded(seeded(Twice))
    assert torch.equal(model(X), expected)
    assert waiting(model) == {"weight"}


def test_weights_come_in_the_dtype_of_the_parameter() -> None:
    model = nn.Linear(3, 3).bfloat16()
    offloaded(model, weights_map={name: tensor.float() for name, tensor in model.state_dict().items()})
    assert model(X.bfloat16()).dtype == torch.bfloat16


class Roundabout(nn.Module):
    """Tells where its inputs are, and returns them in containers."""

    def forward(self, x: torch.Tensor, *, cache: Any = None, mask: Any = None) -> Any:
        return {"out": (x, [mask["m"]]), "cache": cache}


def test_inputs_go_to_the_execution_device_and_outputs_back_but_not_what_is_skipped() -> None:
    model = Roundabout()
    add_hook_to_module(model, AlignDevicesHook("meta", io_same_device=True, skip_keys="cache"))
    inside = list[Any]()
    model.register_forward_pre_hook(lambda _m, args, kwargs: inside.append((args, kwargs)), with_kwargs=True)
    cache, mask = torch.zeros(2), {"m": torch.zeros(1)}
    hook = model._hf_hook
    hook.post_forward = lambda module, output: output  # a meta tensor can't come back
    out = model(X, cache=cache, mask=mask)
    assert out["out"][0].device == out["out"][1][0].device == META
    assert out["cache"] is cache
    assert hook.input_device == torch.device("cpu")
    assert mask["m"].device == torch.device("cpu"), "the caller's containers are left alone"


def test_outputs_return_to_the_device_of_the_first_input() -> None:
    hook = AlignDevicesHook(io_same_device=True, skip_keys=["kept"])
    hook.pre_forward(nn.Identity(), torch.zeros(1, device="meta"))
    moved = hook.post_forward(nn.Identity(), {"x": torch.zeros(1), "kept": torch.zeros(1)})
    assert (moved["x"].device, moved["kept"].device) == (META, torch.device("cpu"))
    hook.pre_forward(nn.Identity(), 3)
    assert hook.post_forward(nn.Identity(), X) is X, "no tensor came in"


def test_modules_that_share_a_weight_share_it_on_the_device() -> None:
    weight = nn.Parameter(torch.randn(3, 3))

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            addresses.append(self.weight.data_ptr())
            return x @ self.weight

    class Outer(Inner):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.inner(x))

    addresses = list[int]()
    model = Outer()
    shared: dict[int, Any] = {weight.data_ptr(): {}}
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    offloaded(model, weights_map=weights, tied_params_map=shared)
    model(X)
    assert len(set(addresses)) == 1
    assert shared == {weight.data_ptr(): {}}, "nothing is held on the device between calls"


def test_a_copy_is_offloaded_on_its_own() -> None:
    expected, model = seeded(Net)(X), offloaded(seeded(Net))
    twin = copy.deepcopy(model)
    assert waiting(twin) == PARAMETERS
    remove_hook_from_submodules(model)
    with torch.no_grad():
        model.linear1.weight.zero_()
    assert torch.equal(twin(X), expected)
    remove_hook_from_submodules(twin)
    assert torch.equal(twin(X), expected)
    assert not waiting(twin)


def test_gradients_flow_through_offloaded_layers() -> None:
    plain, model = seeded(Net), offloaded(seeded(Net))
    left, right = X.clone().requires_grad_(), X.clone().requires_grad_()
    plain(left).sum().backward()
    model(right).sum().backward()
    assert torch.equal(left.grad, right.grad)


def test_hooks_go_to_modules_with_tensors_of_their_own_and_after_those_that_are_there() -> None:
    model = seeded(Net)
    first = add_hook_to_module(model.linear1, ModelHook())._hf_hook
    offloaded(model)
    assert model.linear1._hf_hook.hooks[0] is first
    assert not hasattr(model, "_hf_hook")
    assert "AlignDevicesHook(execution_device=device(type='cpu'), offload=True" in repr(model.linear2._hf_hook)


def test_execution_device_hooks_are_added_where_no_hook_is() -> None:
    model = nn.Sequential(seeded(Net), nn.ReLU())
    mine = add_hook_to_module(model[0].linear1, ModelHook())._hf_hook
    attach_execution_device_hook(model, "cpu", preload_module_classes=["BatchNorm1d"])
    assert model[0].linear1._hf_hook is mine
    assert isinstance(model[0].linear2._hf_hook, AlignDevicesHook)
    assert not hasattr(model[1], "_hf_hook"), "it holds no tensors"


def test_blocks_go_where_their_map_says() -> None:
    expected, model = seeded(Net)(X), seeded(Net)
    attach_align_device_hook_on_blocks(
        model,
        execution_device={"": "cpu", "linear1": "cpu", "batchnorm": "cpu", "linear2": "cpu"},
        offload={"linear1": True, "batchnorm": False, "linear2": True},
        weights_map=seeded(Net).state_dict(),
    )
    assert waiting(model) == {name for name in PARAMETERS if "linear" in name}
    assert model._hf_hook.io_same_device
    assert torch.equal(model(X), expected)


@pytest.mark.parametrize("offload", [False, True])
def test_one_device_is_for_the_model_as_a_whole(offload: bool) -> None:
    expected, model = seeded(Net)(X), seeded(Net)
    attach_align_device_hook_on_blocks(model, execution_device="cpu", offload=offload)
    assert waiting(model) == (PARAMETERS if offload else set())
    assert torch.equal(model(X), expected)


def test_one_value_holds_for_all_blocks_that_the_other_names() -> None:
    expected, model = seeded(Net)(X), seeded(Net)
    blocks = {"linear1": "cpu", "batchnorm": "cpu", "linear2": "cpu"}
    attach_align_device_hook_on_blocks(model, execution_device=blocks, offload=True)
    assert waiting(model) == PARAMETERS
    assert torch.equal(model(X), expected)
    remove_hook_from_submodules(model)
    attach_align_device_hook_on_blocks(model, execution_device="cpu", offload=dict.fromkeys(blocks, False))
    assert not waiting(model)


def test_io_same_device_may_be_switched_on_a_live_hook() -> None:
    model = seeded(Net)
    add_hook_to_module(model, AlignDevicesHook("cpu"))
    model._hf_hook.io_same_device = True
    model(X)
    assert model._hf_hook.input_device == X.device
    remove_hook_from_module(model)


@pytest.mark.parametrize(
    ("given", "device"),
    [(None, None), ("cpu", "cpu"), (torch.device("meta"), "meta"), ("meta", "meta"), ("disk-like", RuntimeError)],
)
def test_devices_are_read_as_torch_and_device_maps_write_them(given: Any, device: Any) -> None:
    if isinstance(device, type):
        with pytest.raises(device):
            resolve_device(given)
    else:
        assert resolve_device(given) == (None if device is None else torch.device(device))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="accelerators are here")
@pytest.mark.parametrize("given", [0, "0", "cuda:1"])
def test_accelerators_that_are_not_here_are_simulated_on_the_cpu(given: Any) -> None:
    assert resolve_device(given) == torch.device("cpu")
