"""Which modules' tensors are brought together, and that this changes neither what is computed nor what streams."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from offstage.stages.dispatch.dispatch_plan import brought_together
from offstage.stages.empty_init.describe import describe
from offstage.stages.empty_init.skeleton import parent
from offstage.stages.units import DeviceId
from tests.stages.dispatch.placed_models import Setup

WIDTH = 16
ROW = torch.linspace(-1, 1, WIDTH).reshape(1, WIDTH)
WEIGHT = 4 * WIDTH * WIDTH


class Mixer(nn.Module):
    """Calls two of its modules, and a third one twice where it ``repeats``."""

    def __init__(self, *, repeats: bool = False) -> None:
        super().__init__()
        self.repeats = repeats
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(self.first(x) if self.repeats else x)


class Block(nn.Module):
    """A norm with a weight of its own beside what a mixer holds."""

    def __init__(self, *, repeats: bool = False) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(WIDTH), Mixer(repeats=repeats)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.mixer(self.norm(x))


def grouped(model: nn.Module, room: int, **own: DeviceId | None) -> dict[str, str]:
    """Return what is brought together of ``model``, all of it streamed to accelerator 0 unless it is in ``own``."""
    skeleton = describe(model, call=lambda m: m(ROW))
    brought = {name: own.get(name, 0) for name in skeleton.by_module}
    sizes = {name: sum(each.bytes for each in tensors) for name, tensors in skeleton.by_module.items()}
    return brought_together(skeleton, brought, sizes, {0: room})


def test_a_whole_block_is_one_part_where_four_find_room() -> None:
    model = nn.Sequential(Block(), Block())
    whole = 2 * WEIGHT + 4 * 3 * WIDTH
    inside = ["", ".norm", ".mixer.first", ".mixer.second"]
    assert grouped(model, 4 * whole) == {f"{n}{name}": str(n) for n in range(2) for name in inside}
    mixers = {f"{n}.mixer.{name}": f"{n}.mixer" for n in range(2) for name in ("first", "second")}
    assert grouped(model, 4 * whole - 1) == mixers
    assert grouped(model, 8 * WEIGHT - 1) == {}


@pytest.mark.parametrize("own", ["0.norm", "0.mixer.first"])
def test_what_goes_its_own_way_keeps_those_around_it_apart(own: str) -> None:
    inside = {"0.mixer.first": "0.mixer", "0.mixer.second": "0.mixer"} if own == "0.norm" else {}
    assert grouped(nn.Sequential(Block()), 10**6, **{own: None}) == inside


@pytest.mark.parametrize("own", ["0.norm", "0.mixer.first"])
def test_what_computes_elsewhere_keeps_those_around_it_apart(own: str) -> None:
    inside = {"0.mixer.first": "0.mixer", "0.mixer.second": "0.mixer"} if own == "0.norm" else {}
    assert grouped(nn.Sequential(Block()), 10**6, **{own: 1}) == inside


def test_a_module_called_twice_is_not_brought_with_others() -> None:
    assert grouped(nn.Sequential(Block(repeats=True)), 10**6) == {}


def test_what_only_the_first_token_calls_is_not_brought_with_what_each_does() -> None:
    skeleton = describe(nn.Sequential(Block()), call=lambda m: m(ROW))
    names = [*skeleton.by_module]
    apart = replace(skeleton, once=("0.mixer.first",))
    brought, sizes = dict.fromkeys(names, 0), dict.fromkeys(names, 1)
    assert brought_together(apart, brought, sizes, {0: 100}) == {}
    assert set(brought_together(skeleton, brought, sizes, {0: 100}).values()) == {"0"}


def test_nothing_is_put_together_that_no_rehearsal_saw() -> None:
    skeleton = replace(describe(nn.Sequential(Block()), call=lambda m: m(ROW)), unrehearsed="it was not")
    names = [*skeleton.by_module]
    assert brought_together(skeleton, dict.fromkeys(names, 0), dict.fromkeys(names, 1), {0: 100}) == {}


@pytest.mark.parametrize("seed", range(12))
def test_any_room_gives_the_same_bits_and_streams_the_same_bytes(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    blocks = [Block(repeats=draw.random() < 0.3) for _ in range(draw.randint(2, 5))]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, 4)).eval().requires_grad_(False)
    homes = {name: draw.choice(["cpu", "disk", "disk", 0]) for name, _ in model.named_modules()}
    computes = {name: draw.choice([0, 0, 0, 1]) for name, _ in model.named_children()}
    parts, streamed = [], []
    for room in (0, draw.choice([5, 12, 50]) * WEIGHT):
        (tmp_path / str(room)).mkdir()
        setup = Setup(
            copy.deepcopy(model), lambda name: homes[parent(name)], tmp_path / str(room), example=ROW,
            execution=lambda module: computes[module.partition(".")[0]], rooms={0: room, 1: room},
        )  # fmt: skip
        with torch.no_grad():
            for number in range(3):
                assert torch.equal(setup.model(ROW * number).cpu(), model(ROW * number))
        setup.streamer.remove()
        parts.append(len(set(setup.score.together.values())))
        streamed.append(setup.streamer.traffic.streamed_bytes)
    assert streamed[0] == streamed[1]
    assert parts[0] == 0
