"""Whole models streamed to accelerators: simulated ones, and one on which everything happens late."""

import json
import os
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake

from offstage.pipeline.decoding import decode
from offstage.pipeline.errors import BudgetError, CheckpointError
from offstage.stages.dispatch.dispatch_plan import DispatchPlan
from offstage.stages.dispatch.streaming.places import data_of
from offstage.stages.dispatch.transfer.links import FreshMemory, SynchronousLink
from offstage.stages.dispatch.transfer.trace import Trace
from offstage.stages.machine.aligned_memory import HostBlock
from offstage.stages.machine.devices import Devices
from offstage.stages.units import DeviceId
from tests.stages.dispatch.late_link import LateLink
from tests.stages.dispatch.placed_models import LAYOUTS, Setup, X, net

everywhere = pytest.mark.parametrize("where", LAYOUTS)


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Callable[..., Setup]]:
    opened: list[Setup] = []

    def make(model: nn.Module, homes: Callable[[str], DeviceId], **options: Any) -> Setup:
        folder = tmp_path / str(len(opened))
        folder.mkdir()
        opened.append(Setup(model, homes, folder, **options))
        return opened[-1]

    yield make
    for one in opened:
        one.streamer.remove()


@everywhere
def test_it_answers_bit_for_bit_like_a_resident_model_and_holds_no_more_than_its_reserve(
    where: str, setup: Callable[..., Setup]
) -> None:
    expected = net()(X)
    stage = setup(net(), LAYOUTS[where])
    for _ in range(4):
        assert torch.equal(stage.model(X), expected)
        assert stage.ledger(0).allocated == stage.resident + stage.reserve, "allocated once"
    assert stage.ledger(0).peak == stage.resident + stage.reserve
    traffic = stage.streamer.traffic
    assert traffic.overflow_bytes == 0
    assert traffic.link_bytes >= traffic.streamed_bytes == 4 * stage.score.streamed_bytes


@everywhere
def test_removing_gives_all_memory_back_and_leaves_weights_waiting(where: str, setup: Callable[..., Setup]) -> None:
    model = net()
    stage = setup(model, LAYOUTS[where])
    before = {name: data_of(tensor).is_meta for name, tensor in model.named_parameters()}
    model(X)
    stage.streamer.remove()
    assert stage.ledger(0).allocated == stage.resident
    assert {name: tensor.is_meta for name, tensor in model.named_parameters()} == before
    assert type(model) is nn.Sequential
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    if where == "host":
        assert torch.equal(model(X), net()(X)), "it computes where its weights are"


def test_a_full_accelerator_is_an_error_before_anything_is_hooked(setup: Callable[..., Setup]) -> None:
    model = net()
    with pytest.raises(BudgetError, match=r"max_memory\.0: the simulated accelerator 0 is full"):
        setup(model, LAYOUTS["host"], devices=Devices({0: 20_000}))
    assert type(model) is nn.Sequential
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert torch.equal(model(X), net()(X))


@everywhere
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_whatever_ends_a_forward_the_model_can_be_called_again(
    where: str, error: type[BaseException], setup: Callable[..., Setup]
) -> None:
    def throw(*_: Any) -> None:
        raise error

    chance, expected, model = random.Random(2), net()(X), net()
    stage = setup(model, LAYOUTS[where])
    for _ in range(25):
        module = chance.choice(list(model.modules()))
        hook = chance.choice([module.register_forward_pre_hook, module.register_forward_hook])(throw)
        with pytest.raises(error):
            model(X)
        hook.remove()
        if chance.random() < 0.7:
            assert torch.equal(model(X), expected)
    assert torch.equal(model(X), expected)
    assert stage.ledger(0).allocated == stage.resident + stage.reserve
    assert stage.streamer.traffic.overflow_bytes == 0, "nothing stayed acquired"


def test_a_model_that_calls_itself_is_not_taken_for_one_that_was_interrupted(
    setup: Callable[..., Setup],
) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)
            self.scale = nn.Parameter(torch.randn(64))

        def forward(self, x: torch.Tensor, again: bool = True) -> torch.Tensor:
            inner = self(x, again=False) if again else x
            return self.layer(inner) * self.scale

    model = Twice().requires_grad_(False)
    expected = model(X)
    stage = setup(model, LAYOUTS["host"])
    assert all(torch.equal(stage.model(X), expected) for _ in range(3))


def test_a_file_that_changes_ends_the_forward_that_needs_it_and_the_memory_stays_usable(
    setup: Callable[..., Setup], tmp_path: Path
) -> None:
    model = net()
    stage = setup(model, LAYOUTS["disk"])
    path = tmp_path / "0" / "weights"
    whole, status = path.read_bytes(), path.stat()
    path.write_bytes(whole[:-4])
    with pytest.raises(CheckpointError, match="the file changed while it was being served"):
        [model(X) for _ in range(3)]
    path.write_bytes(whole)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert torch.equal(model(X), net()(X))
    assert stage.ledger(0).peak == stage.reserve


def test_a_call_in_inference_mode_leaves_memory_that_other_calls_can_use(setup: Callable[..., Setup]) -> None:
    model, expected = net(), net()(X)
    setup(model, LAYOUTS["mixed"])
    with torch.inference_mode():
        assert torch.equal(model(X), expected)
    x = X.clone().requires_grad_()
    assert torch.equal(model(x), expected)
    with torch.inference_mode():
        assert torch.equal(model(X), expected)


def test_an_accelerator_without_streams_is_served_copy_by_copy(setup: Callable[..., Setup]) -> None:
    def plain(_devices: Devices, _device: DeviceId) -> SynchronousLink:
        return SynchronousLink(lambda size: FreshMemory(torch.device("cpu"), size))

    model, expected = net(), net()(X)
    setup(model, LAYOUTS["mixed"], open_link=plain)
    assert all(torch.equal(model(X), expected) for _ in range(4))


def test_the_reserves_survive_the_scores_file(setup: Callable[..., Setup], tmp_path: Path) -> None:
    score = setup(net(), LAYOUTS["mixed"]).score
    score.save(tmp_path)
    assert decode(DispatchPlan, json.loads((tmp_path / "dispatch.json").read_text())) == score
    assert list(score.reserves) == [0]


def test_each_accelerator_streams_into_a_reserve_of_its_own(setup: Callable[..., Setup]) -> None:
    model, expected = net(), net()(X)
    homes: Callable[[str], DeviceId] = lambda name: int(name[0]) // 2 if "weight" in name else "cpu"  # noqa: E731
    stage = setup(model, homes, execution=lambda module: int(module[0]) // 2)
    resident = stage.ledger(1).allocated - stage.score.reserves[1]
    assert all(torch.equal(model(X), expected) for _ in range(3))
    assert set(stage.score.reserves) == {0, 1}
    assert stage.ledger(1).peak == resident + stage.score.reserves[1]


def test_weights_that_wait_on_the_host_lie_in_one_block_and_ties_stay_ties(
    setup: Callable[..., Setup],
) -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)).requires_grad_(False)
    model[1].weight = model[0].weight
    links: list[LateLink] = []

    def open_link(_devices: Devices, _device: DeviceId) -> LateLink:
        links.append(LateLink())
        return links[-1]

    setup(model, LAYOUTS["host"], open_link=open_link)
    assert model[1].weight is model[0].weight
    (pinned,) = links[0].pinned
    assert pinned.nbytes == 64 * 64 * 4, "once, and no more"
    begin = pinned.ctypes.data
    assert begin <= data_of(model[0].weight).data_ptr() < begin + pinned.nbytes


def test_weights_that_were_placed_in_a_block_are_pinned_where_they_are(setup: Callable[..., Setup]) -> None:
    model, link = net(), LateLink()
    host = HostBlock([parameter.nbytes for parameter in model.parameters()])
    for module in model.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = nn.Parameter(host.hold(parameter.data), requires_grad=False)
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    stage = setup(model, LAYOUTS["host"], host=host, open_link=lambda _devices, _device: link)
    assert [memory.ctypes.data for memory in link.pinned] == [host.memory.ctypes.data]
    assert {name: data_of(parameter).data_ptr() for name, parameter in model.named_parameters()} == before
    stage.streamer.remove()
    assert link.pinned == []


class Kernel(nn.Module):
    """Asks a late accelerator to look at its weight, and hands out a part of it."""

    def __init__(self, link: LateLink, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.link, self.expected = link, self.weight.detach().clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not is_fake(self.weight):  # or it is a rehearsal
            self.link.launch(self.weight, self.expected)
        return self.weight[:5]


class Play(nn.Module):
    """Computes with each layer's weight after all the others have come and gone."""

    def __init__(self, link: LateLink) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Kernel(link, 3000 + 1000 * (place % 3)) for place in range(12))
        self.link = link

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        handed_out = self.layers[0](x)
        for layer in self.layers[1:]:
            layer(x)
        if not is_fake(handed_out):
            self.link.launch(handed_out, self.layers[0].expected[:5])
        return x


@pytest.mark.parametrize("pauses", [(0.002, 0.0), (0.0, 0.005)], ids=["slow copies", "slow computing"])
@pytest.mark.parametrize("where", ["host", "disk", "mixed"])
def test_hooks_keep_the_order_of_a_late_accelerator(
    where: str, pauses: tuple[float, float], setup: Callable[..., Setup]
) -> None:
    link = LateLink(copy_pause=pauses[0], compute_pause=pauses[1])
    model = Play(link).requires_grad_(False)
    homes: Mapping[str, Callable[[str], DeviceId]] = {
        **LAYOUTS,
        "mixed": lambda name: "cpu" if int(name.split(".")[1]) % 3 else "disk",
    }
    stage = setup(model, homes[where], open_link=lambda _devices, _device: link)
    for _ in range(6):
        model(X)
    stage.streamer.remove()
    link.end()
    assert link.wrong == []


def test_the_time_line_has_reads_copies_and_computing(setup: Callable[..., Setup]) -> None:
    trace = Trace()
    stage = setup(net(), LAYOUTS["mixed"], trace=trace)
    stage.model(X)
    stage.streamer.remove()
    assert {event["cat"] for event in trace._events} >= {"read", "copy", "compute"}
