"""How long an accelerator waits for weights is told in its own time: the host's thread never waits for it."""

import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from offstage.stages.dispatch.transfer.link import Link
from offstage.stages.dispatch.transfer.links import open_link
from offstage.stages.machine.devices import Devices
from tests.stages.dispatch.placed_models import LAYOUTS, Setup, net

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
]

WIDE, PASSES = 1024, 5
SHORT, LONG = 20_000_000, 200_000_000
"""For so many cycles, about a hundredth and a tenth of a second, a stream has something else to do."""


def test_a_pass_that_is_bound_by_the_link_says_so(tmp_path: Path) -> None:
    """Each pass begins with a link that is busy, whatever else the machine does: that long it waits at least."""
    links: list[Any] = []

    def remember(*of: Any) -> Link:
        links.append(open_link(*of))
        return cast("Link", links[-1])

    example = torch.ones(1, WIDE)
    setup = Setup(net(WIDE), LAYOUTS["host"], tmp_path, devices=Devices(), example=example, open_link=remember)
    x, copies = example.to("cuda:0"), links[-1]._copies
    begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    late, seconds = 0.0, 0.0
    with torch.no_grad():
        for _ in range(3):
            setup.model(x)
        torch.cuda.synchronize()
        before = setup.streamer.traffic.copy()
        for _ in range(PASSES):
            begun.record(copies)
            with torch.cuda.stream(copies):
                torch.cuda._sleep(LONG)
            done.record(copies)
            start = time.perf_counter()
            setup.model(x)
            torch.cuda.synchronize()
            seconds += time.perf_counter() - start
            late += begun.elapsed_time(done) / 1000
    stalled = setup.streamer.traffic.copy().stall_seconds - before.stall_seconds
    setup.streamer.remove()
    assert 0.5 * late < stalled <= seconds


def test_weights_that_came_long_ago_are_waited_for_no_time(tmp_path: Path) -> None:
    setup = Setup(net(64), LAYOUTS["host"], tmp_path, devices=Devices(), example=torch.ones(1, 64))
    x = torch.ones(1, 64, device="cuda:0")
    with torch.no_grad():
        for _ in range(3):
            setup.model(x)
            torch.cuda.synchronize()
        before = setup.streamer.traffic.copy()
        for _ in range(PASSES):
            torch.cuda._sleep(SHORT)
            setup.model(x)
            torch.cuda.synchronize()
    stalled = setup.streamer.traffic.copy().stall_seconds - before.stall_seconds
    setup.streamer.remove()
    assert stalled < 0.01 * PASSES
