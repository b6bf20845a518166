from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from offstage.pipeline.decoding import decode
from offstage.pipeline.errors import CheckpointError
from offstage.stages.dispatch.dispatch_plan import DispatchPlan, make_dispatch_plan
from offstage.stages.dispatch.streaming.streamer import Streamer
from offstage.stages.empty_init.describe import describe
from offstage.stages.empty_init.skeleton import Skeleton, parent
from offstage.stages.machine.devices import Devices
from offstage.stages.plan.layout import lay_out
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.placement import Placement
from offstage.stages.plan.plan import Plan
from offstage.stages.plan.serving import Io
from offstage.stages.units import CPU, DeviceId
from tests.stages.dispatch.placed_models import to_disk
from tests.stages.plan.plans import plan_by_hand
from tests.stages.shard_load.checkpoints import disk_weights


def plan_with(skeleton: Skeleton, on_disk: set[str], io: Io) -> Plan:
    homes: dict[str, DeviceId] = {t.name: "disk" if t.name in on_disk else "cpu" for t in skeleton.tensors}
    execution: dict[str, DeviceId] = {parent(name): "cpu" for name in homes}
    serving = lay_out(Outline(skeleton), Placement(homes, CPU), execution=execution, io=io).serving
    return plan_by_hand(homes, execution, serving)


Result = tuple[Streamer, DispatchPlan]
Dispatch = Callable[..., Result]


@pytest.fixture(params=["direct", "mmap"])
def dispatch(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Dispatch]:
    """Return a function that puts tensors of a model on disk and hooks it; runs with direct and with mapped reads."""
    streamers = []

    def run(model: nn.Module, on_disk: set[str], example: torch.Tensor, *, io: Io = request.param) -> Result:
        skeleton = describe(model, call=lambda m: m(example.to("cpu")))
        plan = make_dispatch_plan(skeleton, plan_with(skeleton, on_disk, io))
        extents = to_disk(model, on_disk, tmp_path / f"weights{len(streamers)}")
        streamer = Streamer(model, plan, stored=disk_weights(extents), devices=Devices())
        streamers.append(streamer)
        return streamer, plan

    yield run
    for streamer in streamers:
        streamer.remove()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).eval().requires_grad_(False)


def waiting(model: nn.Module) -> set[str]:
    return {n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta}


BYTES_ON_DISK = (4 * 8 + 8 + 8 + 8 * 3) * 4
DISK = {"0.weight", "0.bias", "1.running_mean", "3.weight"}
X = torch.randn(5, 4)


def test_a_streamed_model_answers_bit_for_bit_like_a_resident_one(dispatch: Dispatch) -> None:
    expected = net()(X)
    model = net()
    dispatch(model, DISK, X)
    assert torch.equal(model(X), expected)
    assert torch.equal(model(X), expected), "and again"


def test_weights_are_let_go_after_each_use(dispatch: Dispatch) -> None:
    model = net()
    streamer, _ = dispatch(model, DISK, X, io="direct")
    assert waiting(model) == DISK
    seen: list[set[str]] = []
    model[3].register_forward_pre_hook(lambda _m, _a: seen.append(waiting(model)))
    model(X)
    assert seen == [DISK - {"3.weight"}], "a layer's weights are gone when the next layer runs"
    assert waiting(model) == DISK
    assert streamer.traffic.streamed_bytes == BYTES_ON_DISK
    assert streamer.traffic.storage_bytes >= BYTES_ON_DISK, "direct reads begin at an aligned offset"
    assert streamer.traffic.stall_seconds > 0
    assert streamer.traffic.overflow_bytes == 0


def test_mapped_weights_are_used_where_they_lie_and_nothing_is_copied(dispatch: Dispatch) -> None:
    model, places = net(), []
    streamer, _ = dispatch(model, DISK, X, io="mmap")
    model[0].register_forward_pre_hook(lambda module, _a: places.append(module.weight.data_ptr()))
    model(X)
    assert waiting(model) == DISK
    assert (streamer.traffic.streamed_bytes, streamer.traffic.storage_bytes) == (BYTES_ON_DISK, 0)
    model(X)
    assert places[0] == places[1] != 0
    streamer.remove()
    assert waiting(model) == DISK


def test_an_exception_in_a_forward_leaves_nothing_onloaded_and_the_model_callable(dispatch: Dispatch) -> None:
    expected, model = net()(X), net()
    dispatch(model, DISK, X, io="direct")
    handle = model[3].register_forward_pre_hook(lambda _m, _a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(X)
    assert waiting(model) == DISK
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(5, 7))
    assert waiting(model) == DISK
    handle.remove()
    assert torch.equal(model(X), expected)


def test_a_file_that_changes_ends_the_forward_that_needs_it(dispatch: Dispatch, tmp_path: Path) -> None:
    model = net()
    dispatch(model, DISK, X)
    path = tmp_path / "weights0"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="the file changed while it was being served"):
        model(X)


def test_removing_the_hooks_leaves_the_modules_as_they_were(dispatch: Dispatch) -> None:
    model = net()
    streamer, _ = dispatch(model, DISK, X)
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


def test_a_layer_that_is_called_twice_and_tied_gives_the_same_answer(dispatch: Dispatch) -> None:
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


def test_a_parent_that_reads_its_childs_weight_gets_the_weight(dispatch: Dispatch) -> None:
    model = nn.Sequential(Borrowing(), Borrowing()).requires_grad_(False)
    expected = model(X)
    dispatch(model, {"0.child.weight", "1.child.weight", "1.child.bias"}, X)
    assert torch.equal(model(X), expected)


def test_an_embedding_is_gathered_where_it_lies(dispatch: Dispatch) -> None:
    model = nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, 50)).requires_grad_(False)
    tokens = torch.tensor([[3, 49, 0]])
    expected = model(tokens)
    streamer, plan = dispatch(model, {"0.weight", "1.weight"}, tokens)
    assert plan.parts["0"].serving == {"0.weight": "rows"}
    assert torch.equal(model(tokens), expected)
    assert streamer.traffic.streamed_bytes == 4 * 50 * 4, "the head's bytes alone"


def test_a_module_that_hands_out_a_view_of_its_weight_is_never_written_over(dispatch: Dispatch) -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(64, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table[: x.shape[-1]]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions = Positions()
            self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            view = self.positions(x)
            return self.layers(x) @ view

    model, x = Model().requires_grad_(False), torch.randn(3, 64)
    expected = model(x)
    dispatch(model, {name for name, _ in model.named_parameters()}, x)
    assert all(torch.equal(model(x), expected) for _ in range(5))


def test_the_attention_of_torch_works_where_it_cannot_be_rehearsed(dispatch: Dispatch) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert float(self.inner.in_proj_weight.sum()) <= 100
            return self.inner(x, x, x)[0]

    x = torch.randn(1, 3, 4)
    model = Attention().eval().requires_grad_(False)
    expected = model(x)
    assert describe(model, call=lambda m: m(x)).unrehearsed
    dispatch(model, {"inner.out_proj.weight", "inner.in_proj_weight"}, x)
    assert torch.equal(model(x), expected)


def test_the_score_survives_its_file_and_lists_streamed_modules_in_order(dispatch: Dispatch, tmp_path: Path) -> None:
    import json

    model = net()
    _, plan = dispatch(model, DISK, X)
    plan.save(tmp_path)
    assert decode(DispatchPlan, json.loads((tmp_path / "dispatch.json").read_text())) == plan
    assert plan.order == ("0", "1", "3")
    assert plan.entries == {"": "cpu"}
    assert plan.streamed_bytes == BYTES_ON_DISK


class Placed(nn.Linear):
    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device


def test_a_streamed_model_says_its_main_device_and_why_it_cannot_be_moved_until_its_hooks_are_gone(
    dispatch: Dispatch,
) -> None:
    model = Placed(4, 3).requires_grad_(False)
    streamer, _ = dispatch(model, {"weight"}, X, io="direct")
    assert (model.device.type, model.weight.is_meta) == ("cpu", True)
    assert isinstance(model, Placed)
    assert type(model).__name__ == "Placed"
    with pytest.raises(RuntimeError, match=r"can't be moved or cast: .*'weight' first.*change max_memory"):
        model.to(torch.float64)
    streamer.remove()
    assert type(model) is Placed
