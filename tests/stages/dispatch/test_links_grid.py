"""Models of four kinds over two and four simulated accelerators: the answers, the ledgers, and the bytes of each link.

Budgets and maps are drawn at random. ``OFFSTAGE_GRID=25`` draws so many settings of each model: minutes.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from offstage.pipeline.errors import BudgetError
from offstage.stages.calls.results import kept_cache
from offstage.stages.dispatch.loaded_model import LoadedModel, load
from offstage.stages.dispatch.streaming.streamer import streamer_of
from offstage.stages.empty_init.skeleton import parent
from offstage.stages.plan.serving import is_streamed
from offstage.stages.units import CPU, DeviceId
from tests.stages.dispatch.streaming.lockstep_grid import WORDS, saved
from tests.stages.plan.plans import of

SETTINGS = int(os.environ.get("OFFSTAGE_GRID", "0"))
NAMES = ("llama", "mixtral", "t5", "gpt2")
WAYS = ("optimal", "in turn")
"""As the policy has it; or with a part of each layer on one accelerator and of the next on another, by a map."""


def tokens(shape: tuple[int, int], seed: int = 5) -> torch.Tensor:
    return torch.randint(3, WORDS, shape, generator=torch.Generator().manual_seed(seed))


def asked(name: str, past: Mapping[str, Any] | None = None) -> dict[str, torch.Tensor]:
    """Return the arguments of a forward: of a prompt, or of one token more."""
    ids = tokens((2, 6)) if not past else tokens((2, 1))
    return {"input_ids": ids, "decoder_input_ids": tokens((2, 3), seed=6)} if name == "t5" else {"input_ids": ids}


def answers(model: Any, name: str) -> list[torch.Tensor]:
    """Return the logits of a prompt without a cache and with one, of two tokens that follow, and generated tokens."""
    outputs = [model(**asked(name), use_cache=False).logits]
    past: dict[str, Any] = {}
    for _ in range(1 if name == "t5" else 3):
        out = model(**asked(name, past), **past, use_cache=True)
        past = kept_cache(out)
        outputs.append(out.logits)
    return [*outputs, model.generate(tokens((2, 5)), max_new_tokens=4, do_sample=False)]


def in_turn(model: torch.nn.Module, devices: int, draw: random.Random) -> dict[str, DeviceId]:
    """Return a map that leaves a tensor or two of each layer on an accelerator, one layer after another on the next."""
    device_map: dict[str, DeviceId] = {}
    layers: dict[str, list[str]] = {}
    for name in _sizes(model):
        parts = name.split(".")
        number = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
        if number is None:
            device_map[name] = 0
        else:
            layers.setdefault(".".join(parts[: number + 1]), []).append(name)
    for turn, names in enumerate(layers.values()):
        kept = draw.sample([name for name in names if "expert" not in name], 2)
        device_map |= {name: turn % devices if name in kept else draw.choice(["cpu", "disk"]) for name in names}
        device_map |= {name: "cpu" for name in names if "expert" in name}
    return device_map


def options(name: str, devices: int, way: str, plain: Any, draw: random.Random) -> dict[str, Any]:
    """Return how a model is loaded: on so many accelerators, each of which has a share of it that is drawn."""
    whole = sum(parameter.nbytes for parameter in plain.parameters())
    shares = {device: round(whole * draw.uniform(0.12, 0.3)) for device in range(devices)}
    loose: Mapping[DeviceId, int] = {**dict.fromkeys(range(devices), whole), CPU: 2 * whole}
    return {
        "device_map": way if way == "optimal" else in_turn(plain, devices, draw),
        "max_memory": {**shares, CPU: round(whole * draw.uniform(0.0, 1.2))} if way == "optimal" else loose,
        "hardware": {
            "devices": [{"name": str(device), "memory": "100MB"} for device in range(devices)],
            "rates": {
                "storage": "50GB",
                "host": "50GB",
                "host_to_device": "1GB",
                "device": "800GB",
                "launches": "1GB",
            },  # links bind
        },
        "storage": {"io": "direct"},
    }


def fitted(folder: Path, given: dict[str, Any]) -> LoadedModel:
    """Load the checkpoint; with larger budgets where these can't hold a plan."""
    while True:
        try:
            return load(folder / "checkpoint", cache=folder / "cache", max_length=32, batch_size=2, **given)
        except BudgetError:
            given["max_memory"] = {device: round(1.3 * count) + 1000 for device, count in given["max_memory"].items()}


def _sizes(model: torch.nn.Module) -> dict[str, int]:
    """Return the bytes of every tensor, tied names included."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.nbytes for name, tensor in named}


def called_by(model: Any, arguments: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the modules that a forward of ``model`` calls: T5 has a name for its words that none of its code uses."""
    called = set[str]()
    handles = [
        module.register_forward_pre_hook(lambda _module, _args, name=name: called.add(name))
        for name, module in model.named_modules()
    ]
    model(**arguments)
    for handle in handles:
        handle.remove()
    return called


def planned_bytes(loaded: LoadedModel, sizes: Mapping[str, int], called: set[str]) -> Counter[DeviceId]:
    """Return what a forward that calls these modules brings to each device by the plan, experts aside."""
    by_device: Counter[DeviceId] = Counter()
    for name, serving in loaded.plan.serving.items():
        if is_streamed(serving) and parent(name) in called:
            by_device[loaded.plan.execution[parent(name)]] += sizes[name]
    return by_device


def routed_bytes(loaded: LoadedModel) -> Counter[DeviceId]:
    """Return what experts were brought to each device so far."""
    by_device: Counter[DeviceId] = Counter()
    for module, use in streamer_of(loaded.model).routed.uses.items():
        by_device[loaded.plan.execution[module]] += use.streamed_bytes
    return by_device


def check(name: str, devices: int, way: str, number: int, folder: Path) -> int:
    """Fail where the answers, the ledgers or the bytes aren't those expected; return how many links were in use."""
    draw = random.Random(f"{name} {devices} {way} {number}")
    plain = saved(folder / "checkpoint", name, draw.choice([torch.float32, torch.bfloat16]))
    sizes = _sizes(plain)
    given = options(name, devices, way, plain, draw)
    with torch.no_grad(), fitted(folder, given) as loaded:
        for answer, expected in zip(answers(loaded.model, name), answers(plain, name), strict=True):
            assert torch.equal(answer, expected), given
        before, routed = loaded.traffic.copy(), routed_bytes(loaded)
        arguments = asked(name) if name == "t5" else {"input_ids": tokens((1, 1))}
        loaded.model(**arguments)
        expected_bytes = planned_bytes(loaded, sizes, called_by(plain, arguments))
        expected_bytes.update(routed_bytes(loaded) - routed)
        measured = Counter({device: link.bytes for device, link in loaded.traffic.since(before).links.items()})
        assert +measured == +expected_bytes, given
        if name in ("llama", "gpt2"):  # whose forwards use all their weights
            links = {device: count for device, count in measured.items() if isinstance(device, int)}
            assert +Counter(links) == +Counter(of(loaded.plan, "transfer_bytes")), given
        for device, peak in streamer_of(loaded.model)._devices.peaks.items():
            assert peak <= given["max_memory"][device], given
        assert loaded.traffic.overflow_bytes == 0, given
        return sum(1 for device in measured if isinstance(device, int) and measured[device])


CASES = [(name, devices, way) for name in NAMES for devices in (2, 4) for way in WAYS]
SHORT = [("llama", 2, "optimal"), ("mixtral", 2, "in turn"), ("t5", 2, "in turn"), ("gpt2", 4, "in turn")]


@pytest.mark.parametrize(("name", "devices", "way"), CASES if SETTINGS else SHORT)
def test_models_over_several_links_answer_as_in_memory_and_each_link_brings_what_the_plan_says(
    name: str, devices: int, way: str, tmp_path: Path
) -> None:
    busy = max(
        check(name, devices, way, number, tmp_path / str(number)) for number in (range(SETTINGS) if SETTINGS else [1])
    )
    assert busy >= 2 or (way == "optimal" and SETTINGS), "else the test proves nothing"
