"""Layers that compute on two accelerators in turn, or on one and the host: answers, links, and nobody waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from offstage.stages.calls.results import kept_cache
from offstage.stages.machine.devices import Devices
from offstage.stages.units import CPU, DeviceId
from tests.cuda.test_streaming import decode, no_synchronising
from tests.e2e.pipelines import dispatched
from tests.stages.dispatch.placed_models import Setup, net

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
]
two_accelerators = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two accelerators")

WIDTH = 1024
PASSES = 5
PLACES: dict[str, Callable[[str], DeviceId]] = {
    "host": lambda name: "cpu",
    "disk": lambda name: "disk",
    "mixed": lambda name: ["cpu", "disk"][sum(map(ord, name)) % 2],
}
everywhere = pytest.mark.parametrize("where", PLACES)


def inputs() -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randn(3, WIDTH)


def in_turn(*devices: DeviceId) -> Callable[[str], DeviceId]:
    """Return which of ``devices`` computes a module: layer after layer another one."""
    return lambda module: devices[int(module[0]) % len(devices)]


def on_devices(*devices: str) -> torch.Tensor:
    """Return what the model answers whose layers lie on these devices in turn, and compute there."""
    x = inputs()
    for place, layer in enumerate(net(WIDTH)):
        device = torch.device(devices[place % len(devices)])
        x = layer.to(device)(x.to(device))
    return x.to("cuda:0")


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Callable[..., Setup]]:
    opened: list[Setup] = []

    def make(where: str, *devices: DeviceId) -> Setup:
        folder = tmp_path / str(len(opened))
        folder.mkdir()
        options: dict[str, Any] = {"devices": Devices(), "example": inputs(), "execution": in_turn(*devices)}
        opened.append(Setup(net(WIDTH), PLACES[where], folder, **options))
        return opened[-1]

    yield make
    for one in opened:
        one.streamer.remove()


@two_accelerators
@everywhere
def test_two_accelerators_in_turn_answer_as_resident_layers_do_and_each_has_its_own_bytes(
    where: str, setup: Callable[..., Setup]
) -> None:
    expected, stage, x = on_devices("cuda:0", "cuda:1"), setup(where, 0, 1), inputs().to("cuda:0")
    assert all(torch.equal(stage.model(x), expected) for _ in range(PASSES))
    layers = [sum(parameter.nbytes for parameter in layer.parameters()) for layer in net(WIDTH)]
    links = stage.streamer.traffic.links
    assert links[0].bytes == PASSES * (layers[0] + layers[2])
    assert links[1].bytes == PASSES * (layers[1] + layers[3])
    assert stage.streamer.traffic.overflow_bytes == 0


@two_accelerators
@everywhere
def test_nothing_synchronises_between_two_accelerators(where: str, setup: Callable[..., Setup]) -> None:
    expected, stage, x = on_devices("cuda:0", "cuda:1"), setup(where, 0, 1), inputs().to("cuda:0")
    stage.model(x)
    with no_synchronising():
        answers = [stage.model(x) for _ in range(PASSES)]
    assert all(torch.equal(answer, expected) for answer in answers)


@two_accelerators
def test_what_one_accelerator_pinned_the_other_copies_from_as_well(setup: Callable[..., Setup]) -> None:
    stage = setup("mixed", 0, 1)
    carriers = [cache._mover for cache in stage.streamer._caches]
    buffers = {id(carrier._buffers): carrier._buffers for carrier in carriers}
    assert len(buffers) == 1, "both read by way of the same"
    waiting = [parameter for parameter in stage.model.parameters() if not parameter.is_meta]
    for device in range(2):
        with torch.cuda.device(device):
            assert all(parameter.is_pinned() for parameter in waiting)


@two_accelerators
@everywhere
def test_a_slow_accelerator_is_waited_for_by_what_comes_after_it(where: str, setup: Callable[..., Setup]) -> None:
    expected, stage, x = on_devices("cuda:0", "cuda:1"), setup(where, 0, 1), inputs().to("cuda:0")

    def sleep(module: nn.Module, _args: Any) -> None:
        with torch.cuda.device(1):
            torch.cuda._sleep(3_000_000)

    for place, layer in enumerate(stage.model):
        if place % 2:
            layer[0].register_forward_pre_hook(sleep)
    answers = [stage.model(x) for _ in range(PASSES)]
    assert all(torch.equal(answer, expected) for answer in answers)


@everywhere
def test_an_accelerator_and_the_host_in_turn_answer_as_resident_layers_do(
    where: str, setup: Callable[..., Setup]
) -> None:
    expected, stage, x = on_devices("cuda:0", "cpu"), setup(where, 0, CPU), inputs().to("cuda:0")
    assert all(torch.equal(stage.model(x), expected) for _ in range(PASSES))
    assert stage.streamer.traffic.overflow_bytes == 0
    if where == "disk":
        layers = [sum(parameter.nbytes for parameter in layer.parameters()) for layer in net(WIDTH)]
        links = stage.streamer.traffic.links
        assert links[0].bytes == PASSES * (layers[0] + layers[2])
        assert links[CPU].bytes == PASSES * (layers[1] + layers[3])


@two_accelerators
def test_a_llama_on_two_accelerators_in_turn_decodes_with_its_keys_on_both(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=512, intermediate_size=1408, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=256,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "checkpoint")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint").to("cuda:0")
    names = [name for name, _ in [*plain.named_parameters(), *plain.named_buffers()]]
    homes = {name: _home(name) for name in names}
    budgets = {0: "1GB", 1: "1GB", "cpu": "1GB"}
    live = dispatched(tmp_path / "checkpoint", tmp_path, device_map=homes, max_memory=budgets)
    assert torch.equal(decode(live.model, 10), decode(plain, 10)), "both are of one kind"
    ids = torch.arange(5, 13, device="cuda:0")[None]
    (cache,) = kept_cache(live.model(input_ids=ids, use_cache=True)).values()
    assert [layer.keys.device.index for layer in cache.layers] == [0, 1] * 3
    live.streamer.remove()


@two_accelerators
def test_kernels_that_go_by_the_current_accelerator_run_on_that_of_their_layer(setup: Callable[..., Setup]) -> None:
    stage, seen = setup("host", 0, 1), list[int]()
    for layer in stage.model:
        layer[0].register_forward_pre_hook(lambda _module, _args: seen.append(torch.cuda.current_device()))
    stage.model(inputs().to("cuda:0"))
    assert seen == [0, 1, 0, 1]
    assert torch.cuda.current_device() == 0


def _home(name: str) -> DeviceId:
    """Return where a tensor lies: of each layer its norms, by which it computes there, and all else elsewhere."""
    parts = name.split(".")
    if "layers" not in parts:
        return 0
    return int(parts[2]) % 2 if "norm" in name else ["cpu", "disk"][sum(map(ord, name)) % 2]
