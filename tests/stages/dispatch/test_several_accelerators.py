"""Layers that compute on two accelerators in turn: each brings its own ahead, over its own link, to its own reserve."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake

from offstage.pipeline.errors import BudgetError, CheckpointError
from offstage.stages.dispatch.streaming.places import data_of
from offstage.stages.dispatch.transfer.trace import Trace
from offstage.stages.machine.devices import Devices
from offstage.stages.machine.probes import PINNED_BYTES
from offstage.stages.units import CPU, DeviceId
from tests.stages.dispatch.late_link import LateLink
from tests.stages.dispatch.placed_models import Setup, X, net

TENSORS = 6
"""What a layer of the model has, each of which takes one read."""

PLACES: dict[str, Callable[[str], DeviceId]] = {
    "host": lambda name: "cpu",
    "disk": lambda name: "disk",
    "mixed": lambda name: ["cpu", "disk"][sum(map(ord, name)) % 2],
}
everywhere = pytest.mark.parametrize("where", PLACES)


def in_turn(module: str) -> int:
    """Return the accelerator that computes a module: one layer is the first one's, the next the second's."""
    return int(module[0]) % 2


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Callable[..., Setup]]:
    opened: list[Setup] = []

    def make(where: str, model: nn.Module | None = None, **options: Any) -> Setup:
        folder = tmp_path / str(len(opened))
        folder.mkdir()
        opened.append(Setup(model or net(), PLACES[where], folder, **{"execution": in_turn, **options}))
        return opened[-1]

    yield make
    for one in opened:
        one.streamer.remove()


class BegunReads(Trace):
    """Counts the reads that have begun for each device, and lets tests wait until there are as many as they expect."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.changed = threading.Condition()

    @contextmanager
    def span(self, name: str, category: str, **details: Any) -> Iterator[None]:
        if category == "read":
            with self.changed:
                self.counts[self._details["device"]] += 1
                self.changed.notify_all()
        with super().span(name, category, **details):
            yield

    def wait_for(self, device: str, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.counts[device] >= count, timeout=60), (device, count, self.counts)
            assert self.counts[device] < count + TENSORS, "no more than there is room for"


def test_the_next_accelerators_reads_begin_while_one_computes_and_wrap_to_the_next_pass(
    setup: Callable[..., Setup],
) -> None:
    trace, passes = BegunReads(), 3
    stage, expected = setup("disk", trace=trace), net()(X)
    number = 0

    def see(layer: int) -> Callable[[nn.Module, Any], None]:
        def wait(_module: nn.Module, _args: Any) -> None:
            """Each has two layers, and room for one: while the other computes, its next one comes."""
            before = number * 2 * TENSORS
            used = before + TENSORS * ((layer + 1) // 2)
            trace.wait_for(str(1 - layer % 2), used + 1)

        return wait

    for layer in range(4):
        stage.model[layer][0].register_forward_pre_hook(see(layer))
    for number in range(passes):  # noqa: B007  it is what the hooks count from
        assert torch.equal(stage.model(X), expected)
    for device in (0, 1):
        assert stage.ledger(device).peak == stage.score.reserves[device]
    assert stage.streamer.traffic.overflow_bytes == 0


@everywhere
def test_bytes_are_counted_by_link_and_are_those_of_the_layers_that_it_serves(
    where: str, setup: Callable[..., Setup]
) -> None:
    stage, expected = setup(where), net()(X)
    assert all(torch.equal(stage.model(X), expected) for _ in range(3))
    layers = [sum(parameter.nbytes for parameter in layer.parameters()) for layer in net()]
    links = stage.streamer.traffic.links
    assert {device: link.bytes for device, link in links.items()} == {
        0: 3 * (layers[0] + layers[2]), 1: 3 * (layers[1] + layers[3])
    }  # fmt: skip
    assert sum(link.bytes for link in links.values()) == stage.streamer.traffic.streamed_bytes
    assert sum(link.stall_seconds for link in links.values()) == pytest.approx(stage.streamer.traffic.stall_seconds)


@everywhere
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_whatever_ends_a_forward_on_either_accelerator_nothing_stays_behind(
    where: str, error: type[BaseException], setup: Callable[..., Setup]
) -> None:
    def throw(*_: Any) -> None:
        raise error

    stage, expected, chance = setup(where), net()(X), random.Random(5)
    for _ in range(20):
        module = chance.choice(list(stage.model.modules()))
        hook = chance.choice([module.register_forward_pre_hook, module.register_forward_hook])(throw)
        with pytest.raises(error):
            stage.model(X)
        hook.remove()
        if chance.random() < 0.7:
            assert torch.equal(stage.model(X), expected)
    assert torch.equal(stage.model(X), expected)
    assert [stage.ledger(device).allocated for device in (0, 1)] == [stage.score.reserves[device] for device in (0, 1)]
    assert stage.streamer.traffic.overflow_bytes == 0, "nothing stayed acquired"
    stage.streamer.remove()
    assert [stage.ledger(device).allocated for device in (0, 1)] == [0, 0]


def test_a_file_that_changes_fails_the_pass_and_both_accelerators_go_on_after_it(
    setup: Callable[..., Setup], tmp_path: Path
) -> None:
    stage, expected, path = setup("disk"), net()(X), tmp_path / "0" / "weights"
    whole, status = path.read_bytes(), path.stat()
    path.write_bytes(whole[:-4])
    with pytest.raises(CheckpointError, match="the file changed while it was being served"):
        [stage.model(X) for _ in range(3)]
    under_way = [entry.transfer.work for cache in stage.streamer._caches for entry in cache._entries.values()]
    wait([work for arriving in under_way for work in arriving])
    path.write_bytes(whole)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert all(torch.equal(stage.model(X), expected) for _ in range(3))
    assert all(stage.ledger(device).peak == stage.score.reserves[device] for device in (0, 1))


class Kernel(nn.Module):
    """Asks a late accelerator to look at its weight when its turn comes there."""

    def __init__(self, link: LateLink, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.link, self.expected = link, self.weight.detach().clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not is_fake(self.weight):  # or it is a rehearsal
            self.link.launch(self.weight, self.expected)
        return x


class Layer(nn.Sequential):
    """What computes on one device."""


@everywhere
def test_two_late_accelerators_share_few_pinned_buffers_and_never_see_bytes_of_the_other(
    where: str, setup: Callable[..., Setup]
) -> None:
    links = [LateLink(copy_pause=0.002, compute_pause=0.001), LateLink(copy_pause=0.0005, compute_pause=0.002)]
    links[1].pinned = links[0].pinned  # what one registers all copy from
    torch.manual_seed(1)
    model = nn.Sequential(*(Layer(Kernel(links[place % 2], 3000 + 900 * (place % 3))) for place in range(8)))
    model.requires_grad_(False)
    stage = setup(where, model, open_link=lambda _devices, device: links[device])
    pinned = sum(memory.nbytes for memory in links[0].pinned)
    waiting = sum(data_of(parameter).nbytes for parameter in model.parameters() if not data_of(parameter).is_meta)
    assert pinned - waiting <= min(PINNED_BYTES, sum(stage.score.reserves.values()))
    for _ in range(5):
        model(X)
    stage.streamer.remove()
    for link in links:
        link.end()
    assert (links[0].wrong, links[1].wrong, links[0].pinned) == ([], [], [])


def test_an_accelerator_that_has_no_room_for_its_reserve_leaves_the_other_empty_and_the_model_whole(
    setup: Callable[..., Setup],
) -> None:
    model, devices = net(), Devices({0: 10**7, 1: 1000})
    with pytest.raises(BudgetError, match=r"max_memory\.1: the simulated accelerator 1 is full"):
        setup("host", model, devices=devices)
    assert devices.allocated == {0: 0, 1: 0}
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    assert torch.equal(model(X), net()(X))


@everywhere
def test_an_accelerator_and_the_host_in_turn_bring_each_its_own(where: str, setup: Callable[..., Setup]) -> None:
    computes: tuple[DeviceId, ...] = (0, CPU)
    stage, expected = setup(where, execution=lambda module: computes[int(module[0]) % 2]), net()(X)
    assert all(torch.equal(stage.model(X), expected) for _ in range(3))
    brought = {device: link.bytes for device, link in stage.streamer.traffic.links.items()}
    layers = [list(layer.named_parameters(prefix=str(place))) for place, layer in enumerate(net())]
    on_disk = sum(p.nbytes for place in (1, 3) for name, p in layers[place] if PLACES[where](name) == "disk")
    assert brought[0] == 3 * sum(parameter.nbytes for place in (0, 2) for _, parameter in layers[place])
    assert brought.get(CPU, 0) == 3 * on_disk, "what lies on the host is used where it is"
    assert stage.ledger(0).peak == stage.score.reserves[0]
