from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import nn

from stages.dispatch.score import Score, from_json, write_score
from stages.dispatch.streaming import Streamer, pin_device
from stages.empty_init.describe import describe
from stages.empty_init.skeleton import parent
from stages.plan.plan import Plan


class Storage(Mapping[str, torch.Tensor]):
    """Weights that wait on disk; counts what is read, and can be told to fail."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.weights, self.reads, self.broken = weights, list[str](), set[str]()

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self.broken:
            raise OSError(f"{name} can't be read")
        self.reads.append(name)
        return self.weights[name].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


def plan_with(model: nn.Module, on_disk: set[str]) -> Plan:
    names = [t.name for t in describe(model, rehearsed=False).tensors]
    homes = {name: "disk" if name in on_disk else "cpu" for name in names}
    execution = {parent(name): "cpu" for name in names}
    return Plan("explicit", "cpu", homes, homes, execution, {}, {}, 0, {})


def dispatch(model: nn.Module, on_disk: set[str], example: torch.Tensor) -> tuple[Streamer, Storage, Score]:
    skeleton = describe(model, call=lambda m: m(example.to("cpu")))
    score = write_score(skeleton, plan_with(model, on_disk))
    tensors = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
    storage = Storage({name: tensors[name].detach().clone() for name in on_disk})
    for name in on_disk:
        owner = model.get_submodule(parent(name))
        attribute = name.rpartition(".")[2]
        if attribute in owner._parameters:
            owner._parameters[attribute] = nn.Parameter(tensors[name].to("meta"), requires_grad=False)
        else:
            owner._buffers[attribute] = tensors[name].to("meta")
    streamer = Streamer(model, score, offloaded=storage, torch_device=lambda device: torch.device("cpu"))
    return streamer, storage, score


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).eval().requires_grad_(False)


def waiting(model: nn.Module) -> set[str]:
    return {n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.device.type == "meta"}


DISK = {"0.weight", "0.bias", "1.running_mean", "3.weight"}
X = torch.randn(5, 4)


def test_a_streamed_model_answers_bit_for_bit_like_a_resident_one() -> None:
    expected = net()(X)
    model = net()
    dispatch(model, DISK, X)
    assert torch.equal(model(X), expected)
    assert torch.equal(model(X), expected), "and again"


def test_weights_are_let_go_after_each_use() -> None:
    model = net()
    streamer, storage, _ = dispatch(model, DISK, X)
    assert waiting(model) == DISK
    seen: list[set[str]] = []
    model[3].register_forward_pre_hook(lambda _m, _a: seen.append(waiting(model)))
    model(X)
    assert seen == [DISK - {"3.weight"}], "a layer's weights are gone when the next layer runs"
    assert waiting(model) == DISK
    assert sorted(storage.reads) == sorted(DISK)
    assert streamer.traffic.streamed_bytes == sum(storage.weights[name].nbytes for name in DISK)
    assert streamer.traffic.stall_seconds > 0


def test_an_exception_in_a_forward_leaves_nothing_onloaded_and_the_model_callable() -> None:
    expected, model = net()(X), net()
    dispatch(model, DISK, X)
    handle = model[3].register_forward_pre_hook(lambda _m, _a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(X)
    assert waiting(model) == DISK
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(5, 7))
    assert waiting(model) == DISK
    handle.remove()
    assert torch.equal(model(X), expected)


def test_a_read_that_fails_surfaces_in_the_forward_that_needed_it() -> None:
    expected, model = net()(X), net()
    _, storage, _ = dispatch(model, DISK, X)
    storage.broken = {"0.bias"}
    with pytest.raises(OSError, match=r"0\.bias can't be read"):
        model(X)
    assert waiting(model) == DISK
    storage.broken = set()
    assert torch.equal(model(X), expected)


def test_removing_the_hooks_leaves_the_modules_as_they_were() -> None:
    model = net()
    streamer, _, _ = dispatch(model, DISK, X)
    streamer.remove()
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert all(not m._forward_hooks_always_called for m in model.modules())
    assert "forward" not in vars(model[0])


class Shared(nn.Module):
    """Calls one layer twice, and inside itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.layer(self.layer(x)))


def test_a_layer_that_is_called_twice_and_tied_gives_the_same_answer() -> None:
    torch.manual_seed(1)
    plain = Shared().requires_grad_(False)
    expected = plain(X)
    dispatch(plain, {"layer.weight", "tied.weight"}, X)
    assert torch.equal(plain(X), expected)


class Borrowing(nn.Module):
    """Reads its child's weight without calling the child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.child.weight) * 2


def test_a_parent_that_reads_its_childs_weight_gets_the_weight() -> None:
    model = nn.Sequential(Borrowing(), Borrowing()).requires_grad_(False)
    expected = model(X)
    dispatch(model, {"0.child.weight", "1.child.weight", "1.child.bias"}, X)
    assert torch.equal(model(X), expected)
    assert len(waiting(model)) == 3


def test_the_attention_of_torch_works_where_it_cannot_be_rehearsed() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert float(x.sum()) == float(x.sum())
            return self.inner(x, x, x)[0]

    x = torch.randn(1, 3, 4)
    model = Attention().eval().requires_grad_(False)
    expected = model(x)
    assert describe(model, call=lambda m: m(x)).unrehearsed
    dispatch(model, {"inner.out_proj.weight", "inner.in_proj_weight"}, x)
    assert torch.equal(model(x), expected)


def test_the_score_survives_its_file_and_lists_streamed_modules_in_order(tmp_path) -> None:
    import json

    model = net()
    _, _, score = dispatch(model, DISK, X)
    score.save(tmp_path)
    assert from_json(json.loads((tmp_path / "dispatch.json").read_text())) == score
    assert score.order == ("0", "1", "3")
    assert score.entries == {"": "cpu"}
    assert score.streamed_bytes == (4 * 8 + 8 + 8 + 8 * 3) * 4


def test_the_device_of_a_model_is_its_main_device_where_its_first_weight_waits() -> None:
    class Placed(nn.Linear):
        @property
        def device(self) -> torch.device:
            return next(self.parameters()).device

    model = Placed(2, 2, device="meta")
    assert model.device.type == "meta"
    pin_device(model, torch.device("cpu"))
    assert model.device.type == "cpu"
    assert isinstance(model, Placed)
    assert type(model).__name__ == "Placed"
