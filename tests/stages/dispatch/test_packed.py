"""Weights that rest packed on disk compute as they do in memory, on every tier; what is streamed are bytes at rest."""

import os
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.packed import AtRest, PackedTensor, rest_bytes
from offstage.stages.dispatch.streaming.streamer import Streamer
from offstage.stages.empty_init.describe import describe
from offstage.stages.empty_init.skeleton import parent
from offstage.stages.machine.devices import Devices
from offstage.stages.shard_load.expert_rows import locate_rows
from offstage.stages.units import DeviceId
from tests.long_form import in_ci
from tests.stages.dispatch.experts.mixtures import mixture, waiting_experts
from tests.stages.dispatch.experts.test_expert_stack import answers, equal
from tests.stages.dispatch.placed_models import LAYOUTS, ROOM, Setup, X, net, score_for
from tests.stages.packed_models import (
    PackedFile,
    ScaledRows,
    TorchScaledRows,
    is_packed,
    quantised,
    read_into_memory,
    to_packed,
)
from tests.stages.shard_load.checkpoints import disk_weights

CODECS = {
    "in rows": ScaledRows(),
    "whole": ScaledRows(alone=False),
    "turned": ScaledRows(turned=True),
    "in large blocks": ScaledRows(block_rows=4000),
}
every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


@pytest.fixture
def placed(tmp_path: Path) -> Iterator[Callable[..., Setup]]:
    made: list[Setup] = []

    def make(codec: ScaledRows, layout: str, **options: object) -> Setup:
        model = quantised(net(320 if codec.block_rows > 1000 else 64), codec)
        made.append(Setup(model, LAYOUTS[layout], tmp_path, store=to_packed(codec), **options))
        return made[-1]

    yield make
    for setup in made:
        setup.streamer.remove()


def at_rest(setup: Setup) -> int:
    return sum(rest_bytes(source) for source in setup.streamer._stored.extents.values())


@every_codec
@pytest.mark.parametrize("layout", ["disk", "mixed", "torn"])
def test_an_accelerator_gets_what_is_unpacked_on_its_way(
    codec: ScaledRows, layout: str, placed: Callable[..., Setup]
) -> None:
    width = 320 if codec.block_rows > 1000 else 64
    plain, x = quantised(net(width), codec), torch.randn(3, width)
    setup = placed(codec, layout, example=x)
    for _ in range(3):
        assert torch.equal(setup.model(x), plain(x))
    assert setup.streamer.traffic.overflow_bytes == 0
    assert setup.ledger(0).peak <= setup.resident + setup.reserve


TORCH_CODECS = {
    "in rows": TorchScaledRows(),
    "turned": TorchScaledRows(turned=True),
    "in large blocks": TorchScaledRows(block_rows=400),
}


@pytest.mark.parametrize("codec", TORCH_CODECS.values(), ids=TORCH_CODECS)
@pytest.mark.parametrize("layout", ["disk", "mixed", "torn"])
def test_an_accelerator_unpacks_what_comes_to_it_packed_within_the_room_it_was_given(
    codec: TorchScaledRows, layout: str, placed: Callable[..., Setup]
) -> None:
    plain, room = quantised(net(), codec), 400_000
    setup = placed(codec, layout, unpacking={0: room})
    for count in (1, 2, 3):
        assert torch.equal(setup.model(X), plain(X))
        assert setup.streamer.traffic.links[0].bytes == setup.streamer.traffic.streamed_bytes
        assert setup.streamer.traffic.link_bytes < (count + 1) * setup.streamer.traffic.streamed_bytes
    assert setup.streamer.traffic.overflow_bytes == 0
    assert setup.resident + setup.reserve < setup.ledger(0).peak <= setup.resident + setup.reserve + room


@pytest.mark.parametrize("codec", TORCH_CODECS.values(), ids=TORCH_CODECS)
def test_what_waits_packed_in_memory_crosses_the_link_from_there(codec: TorchScaledRows, tmp_path: Path) -> None:
    plain, model = quantised(net(), codec), quantised(net(), codec)
    given = {"unpacking": {0: 400_000}, "store": into_memory(codec)}
    setup = Setup(model, LAYOUTS["disk"], tmp_path, serving="packed", **given)
    (tmp_path / "weights").unlink()
    for _ in range(3):
        assert torch.equal(setup.model(X), plain(X))
    traffic = setup.streamer.traffic
    assert (traffic.storage_bytes, traffic.links[0].bytes) == (0, traffic.streamed_bytes)
    setup.streamer.remove()


@pytest.mark.parametrize("waits", ["disk", "memory"])
@pytest.mark.parametrize(("name", "turned"), in_ci(("gpt-oss", True), of=[("gpt-oss", True), ("Mixtral", False)]))
def test_experts_are_unpacked_in_their_slots_where_the_accelerator_can(
    name: str, turned: bool, waits: str, tmp_path: Path
) -> None:
    codec = TorchScaledRows(turned=turned)
    plain = quantised(mixture(name, torch.float32), codec)
    model, expected = deepcopy(plain), answers(plain)
    stacks = [stack for spec in describe(model, rehearsed=False).experts for stack in spec.tensors]
    places = to_packed(codec)(model, stacks, tmp_path / "weights")
    if waits == "memory":
        places = {stack: read_into_memory(at) if isinstance(at, PackedTensor) else at for stack, at in places.items()}
    rows = {stack: locate_rows([place], place.shape, place.dtype) for stack, place in places.items()}
    stored = disk_weights(places, rows)
    for unpacking in (10**6, 10**3):
        with waiting_experts(model, 3, stored=stored, unpacking=unpacking) as (_, traffic):
            assert equal(answers(model), expected)
            assert (traffic.links[0].bytes == traffic.streamed_bytes) == (unpacking == 10**6)


def test_an_accelerator_without_the_room_gets_what_the_host_unpacks(placed: Callable[..., Setup]) -> None:
    plain = quantised(net(), TorchScaledRows())
    setup = placed(TorchScaledRows(), "disk", unpacking={0: 1000})
    assert torch.equal(setup.model(X), plain(X))
    assert setup.streamer.traffic.links[0].bytes > 2 * setup.streamer.traffic.streamed_bytes
    assert setup.ledger(0).peak <= setup.resident + setup.reserve


@every_codec
@pytest.mark.parametrize("staging", [140_000, 10**7])
def test_the_host_unpacks_into_its_staging_memory(
    codec: ScaledRows, staging: int, placed: Callable[..., Setup]
) -> None:
    width = 320 if codec.block_rows > 1000 else 64
    plain, x = quantised(net(width), codec), torch.randn(3, width)
    setup = placed(codec, "disk", example=x, execution=lambda _: "cpu", staging_bytes=width * staging // 64)
    traffic = setup.streamer.traffic
    for count in (1, 2, 3):
        assert torch.equal(setup.model(x), plain(x))
        assert traffic.streamed_bytes == count * at_rest(setup)
    assert traffic.overflow_bytes == 0
    assert at_rest(setup) < 0.3 * sum(parameter.nbytes for parameter in plain.parameters())


def into_memory(codec: ScaledRows) -> Callable[..., dict[str, AtRest]]:
    """Return what does as ``to_packed``, reads what rests packed into memory, and leaves nothing else on disk."""

    def store(model: nn.Module, on_disk: set[str], path: Path) -> dict[str, AtRest]:
        weights = {name for name in on_disk if is_packed(name, model.get_parameter(name))}
        places = to_packed(codec)(model, weights, path)
        return {name: read_into_memory(place) for name, place in places.items() if isinstance(place, PackedTensor)}

    return store


@every_codec
@pytest.mark.parametrize("computes", ["cpu", 0])
def test_what_waits_packed_in_memory_is_unpacked_for_each_use_and_nothing_is_read(
    codec: ScaledRows, computes: DeviceId, tmp_path: Path
) -> None:
    plain, model = quantised(net(), codec), quantised(net(), codec)
    given = {"execution": lambda _: computes, "staging_bytes": 140_000, "store": into_memory(codec)}
    setup = Setup(model, LAYOUTS["disk"], tmp_path, serving="packed", **given)
    (tmp_path / "weights").unlink()
    for _ in range(3):
        assert torch.equal(setup.model(X), plain(X))
    traffic = setup.streamer.traffic
    biases = sum(p.nbytes for n, p in plain.named_parameters() if p.dim() == 1) if computes == 0 else 0
    assert (traffic.storage_bytes, traffic.streamed_bytes) == (0, 3 * (at_rest(setup) + biases))
    setup.streamer.remove()


def test_damage_surfaces_in_the_forward_that_needs_it_and_can_be_mended(
    tmp_path: Path, placed: Callable[..., Setup]
) -> None:
    plain = quantised(net(), ScaledRows())
    setup = placed(ScaledRows(), "disk", execution=lambda _: "cpu", staging_bytes=140_000)
    source = setup.streamer._stored.extents["2.0.weight"]
    with (tmp_path / "weights").open("r+b") as file:
        file.seek(source.begin + 100)
        (right,) = file.read(1)
        file.seek(source.begin + 100)
        file.write(b"\x80")
        file.flush()
        refreshed(setup, tmp_path / "weights")
        for _ in range(2):
            with pytest.raises(CheckpointError, match="weights: has a code that no tensor has"):
                setup.model(X)
        file.seek(source.begin + 100)
        file.write(bytes([right]))
    refreshed(setup, tmp_path / "weights")
    assert torch.equal(setup.model(X), plain(X))


def refreshed(setup: Setup, path: Path) -> None:
    """Have the time of the file be what it was: only its bytes are wrong."""
    file = next(iter(setup.streamer._stored.extents.values())).file
    assert file.mtime_ns is not None
    os.utime(path, ns=(file.mtime_ns, file.mtime_ns))


@pytest.mark.parametrize("computes", ["cpu", 0])
@pytest.mark.parametrize(
    ("name", "turned", "waits"),
    [("gpt-oss", True, "disk"), ("gpt-oss", True, "memory"), ("Mixtral", False, "disk"), ("Mixtral", False, "memory")],
)
def test_experts_come_into_their_slots_one_by_one(
    name: str, turned: bool, waits: str, computes: DeviceId, tmp_path: Path
) -> None:
    codec = ScaledRows(turned=turned)
    plain = quantised(mixture(name, torch.float32), codec)
    model, expected = deepcopy(plain), answers(plain)
    stacks = [stack for spec in describe(model, rehearsed=False).experts for stack in spec.tensors]
    places = to_packed(codec)(model, stacks, tmp_path / "weights")
    if waits == "memory":
        places = {stack: read_into_memory(at) if isinstance(at, PackedTensor) else at for stack, at in places.items()}
    rows = {stack: locate_rows([place], place.shape, place.dtype) for stack, place in places.items()}
    for slots in (3, 1000):
        with waiting_experts(model, slots, stored=disk_weights(places, rows), computes=computes) as (_, traffic):
            assert equal(answers(model), expected)
            assert slots < 1000 or 0 < traffic.streamed_bytes <= sum(map(rest_bytes, places.values()))
            assert (traffic.storage_bytes == 0) == (waits == "memory" and name == "Mixtral"), "biases stay on disk"


def test_an_expert_is_what_the_checkpoint_holds_of_it_one_by_one(tmp_path: Path) -> None:
    file, codec = PackedFile(tmp_path / "weights", ScaledRows()), ScaledRows()
    stack = quantised(nn.ParameterList([torch.randn(3, 10, 6)]), codec)[0].detach()
    for expert, matrix in enumerate(stack):
        file.add(f"{expert}.gate", matrix[:5])
        file.add(f"{expert}.up", matrix[5:])
    places = file.write()
    rows = locate_rows([*places.values()], (3, 10, 6), "float32")
    assert [len(row) for row in rows] == [2, 2, 2]
    weights = disk_weights({}, {"stack": rows})
    assert torch.equal(weights["stack"], stack)
    whole = [PackedTensor(ScaledRows(alone=False), place.parts, place.dtype, (1, 5, 6)) for place in places.values()]
    assert locate_rows(whole[:1], (5, 6), "float32") == ()


class Reader(nn.Module):
    """A table that is looked up, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(50, 16), nn.Linear(16, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.layer(self.table(words))


@pytest.mark.parametrize("alone", [True, False])
def test_rows_of_a_packed_embedding_are_read_alone_or_it_is_streamed(alone: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    codec = ScaledRows(alone=alone)
    plain = quantised(Reader(), codec).requires_grad_(False)
    model = deepcopy(plain)
    skeleton = describe(model, call=lambda m: m(torch.tensor([[1, 2]])))
    homes: dict[str, DeviceId] = {tensor.name: "disk" for tensor in skeleton.tensors}
    plan = score_for(skeleton, homes, {parent(name): "cpu" for name in homes})
    assert plan.parts["table"].serving == {"table.weight": "rows"}
    places = to_packed(codec)(model, homes, tmp_path / "weights")
    streamer = Streamer(model, plan, stored=disk_weights(places), devices=Devices({0: ROOM}))
    words = torch.tensor([[4, 4, 49], [0, 7, 4]])
    for _ in range(2):
        assert torch.equal(model(words), plain(words))
    table, layer = (sum(rest_bytes(places[f"{n}.{p}"]) for p in ps) for n, ps in PARTS.items())
    assert streamer.traffic.streamed_bytes == 2 * (layer if alone else layer + table)
    assert torch.equal(model.table.weight[3:5], plain.table.weight[3:5])
    assert model(words[:, :0]).shape == (2, 0, 3)
    with pytest.raises(IndexError):
        model(torch.tensor([50]))
    streamer.remove()


PARTS = {"table": ("weight",), "layer": ("weight", "bias")}
