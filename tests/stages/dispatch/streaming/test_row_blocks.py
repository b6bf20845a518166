"""A weight that comes by blocks of rows: what it does to products, traffic, memory, calls in lockstep and gradients."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offstage.pipeline.decoding import decode
from offstage.stages.checkpoints.codecs.ordered_linear import OrderedLinear
from offstage.stages.dispatch.dispatch_plan import DispatchPlan
from offstage.stages.dispatch.streaming.row_blocks import BlockedWeight
from offstage.stages.dispatch.streaming.streamer import Streamer
from offstage.stages.machine.devices import Devices
from offstage.stages.machine.row_products import measure as is_exact_by_rows
from tests.stages.dispatch.placed_models import Setup, to_disk
from tests.stages.shard_load.checkpoints import disk_weights

WIDTH, WORDS, ROWS = 32, 5003, 1024
BLOCK = ROWS * WIDTH * 4
X = torch.randn(2, 3, WIDTH)


@pytest.fixture(scope="module", autouse=True)
def _exact() -> None:
    if not is_exact_by_rows("float32"):
        pytest.skip("this machine's kernels have other bits")


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(torch.relu(self.body(x)))
        return result


def head(linear: type[nn.Linear] = nn.Linear) -> Head:
    torch.manual_seed(0)
    made = Head().eval().requires_grad_(False)
    made.head.__class__ = linear
    return made


def by_blocks(plan: DispatchPlan, room: int) -> DispatchPlan:
    part = replace(plan.parts["head"], block_rows={"head.weight": ROWS})
    return replace(plan, parts={**plan.parts, "head": part}, staging_bytes=room, reserves={0: room})


def attached(
    folder: Path, *, home: str, device: Any, room: int = 3 * BLOCK, linear: type[nn.Linear] = nn.Linear
) -> tuple[Head, Streamer]:
    """Return a model whose head, such a ``linear`` layer, comes by blocks from ``home`` to ``device``."""
    made = Setup(head(), lambda name: home, folder, example=X, execution=lambda module: device)
    made.streamer.remove()
    model, extents = head(linear), {}
    if home == "disk":
        extents = to_disk(model, {"head.weight", "head.bias", "body.weight", "body.bias"}, folder / "again", begin=64)
    devices = Devices({0: 10**7})
    return model, Streamer(model, by_blocks(made.score, room), stored=disk_weights(extents), devices=devices)


@pytest.mark.parametrize(("home", "device"), [("disk", "cpu"), ("disk", 0), ("cpu", 0)])
def test_a_product_by_blocks_is_that_of_the_whole_and_each_row_comes_once(
    home: str, device: Any, tmp_path: Path
) -> None:
    model, streamer = attached(tmp_path, home=home, device=device)
    assert isinstance(model.head.weight, BlockedWeight)
    whole = head()
    for _ in range(3):
        before = streamer.traffic.streamed_bytes
        with torch.no_grad():
            assert torch.equal(model(X), whole(X))
        assert streamer.traffic.streamed_bytes - before == sum(p.nbytes for p in whole.parameters())
    assert streamer.traffic.overflow_bytes == 0
    streamer.remove()
    assert not isinstance(model.head.weight, BlockedWeight)


def test_so_is_one_in_the_order_of_products_with_packed_weights(
    tmp_path: Path, compiled_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(compiled_cache))
    model, streamer = attached(tmp_path, home="disk", device="cpu", linear=OrderedLinear)
    before = streamer.traffic.streamed_bytes
    with torch.no_grad():
        assert torch.equal(model(X), head(OrderedLinear)(X))
    assert streamer.traffic.streamed_bytes - before == sum(p.nbytes for p in model.parameters())
    assert streamer.traffic.overflow_bytes == 0


def test_one_block_alone_has_room_enough(tmp_path: Path) -> None:
    model, streamer = attached(tmp_path, home="disk", device="cpu", room=BLOCK + WORDS * 4)
    with torch.no_grad():
        assert torch.equal(model(X), head()(X))
    assert streamer.traffic.overflow_bytes == 0


def test_calls_in_lockstep_share_each_block(tmp_path: Path) -> None:
    model, streamer = attached(tmp_path, home="disk", device="cpu")
    inputs = [torch.randn(2, length, WIDTH) for length in (1, 4, 9)]
    outputs: dict[int, torch.Tensor] = {}
    for _ in range(2):
        before = streamer.traffic.streamed_bytes
        tasks = [lambda number=number: outputs.update({number: model(inputs[number])}) for number in range(3)]
        streamer.passes.go_together(tasks, size=3)
        assert streamer.traffic.streamed_bytes - before == sum(p.nbytes for p in head().parameters())
    assert all(torch.equal(outputs[number], head()(x)) for number, x in enumerate(inputs))


def test_with_gradients_all_of_the_weight_is_read(tmp_path: Path) -> None:
    model, _ = attached(tmp_path, home="disk", device="cpu")
    given, wanted = X.clone().requires_grad_(), X.clone().requires_grad_()
    model(given).square().sum().backward()
    head()(wanted).square().sum().backward()
    assert torch.equal(given.grad, wanted.grad)  # type: ignore[arg-type]


def test_a_call_that_fails_lets_its_block_go(tmp_path: Path) -> None:
    model, streamer = attached(tmp_path, home="disk", device="cpu", room=BLOCK + WORDS * 4)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), torch.no_grad():
            model.head(torch.randn(2, WIDTH + 1))
    with torch.no_grad():
        assert torch.equal(model(X), head()(X))
    assert streamer.traffic.overflow_bytes == 0


def test_the_dispatch_plan_says_which_weights_come_so(tmp_path: Path) -> None:
    import json

    made = Setup(head(), lambda name: "disk", tmp_path, example=X, execution=lambda module: "cpu")
    plan = by_blocks(made.score, BLOCK)
    plan.save(tmp_path)
    read = decode(DispatchPlan, json.loads((tmp_path / "dispatch.json").read_text()))
    assert read.parts["head"].block_rows == {"head.weight": ROWS}
    assert not read.parts["body"].block_rows
