"""How long an accelerator waits for weights is told in its own time: the host's thread never waits for it."""

import time
from pathlib import Path

import pytest
import torch

from offstage.stages.machine.devices import Devices
from tests.stages.dispatch.placed_models import LAYOUTS, Setup, net

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
]

WIDE, PASSES = 4096, 5


def test_a_pass_that_is_bound_by_the_link_says_so(tmp_path: Path) -> None:
    """One row is multiplied in microseconds by weights that take the link milliseconds."""
    setup = Setup(net(WIDE), LAYOUTS["host"], tmp_path, devices=Devices(), example=torch.ones(1, WIDE))
    x = torch.ones(1, WIDE, device="cuda:0")
    with torch.no_grad():
        for _ in range(3):
            setup.model(x)
        torch.cuda.synchronize()
        before, began = setup.streamer.traffic.copy(), time.perf_counter()
        for _ in range(PASSES):
            setup.model(x)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    stalled = setup.streamer.traffic.copy().stall_seconds - before.stall_seconds
    setup.streamer.remove()
    assert 0.5 * seconds < stalled <= seconds


def test_weights_that_came_long_ago_are_waited_for_no_time(tmp_path: Path) -> None:
    setup = Setup(net(64), LAYOUTS["host"], tmp_path, devices=Devices(), example=torch.ones(1, 64))
    x = torch.ones(1, 64, device="cuda:0")
    with torch.no_grad():
        for _ in range(3):
            setup.model(x)
            torch.cuda.synchronize()
        before = setup.streamer.traffic.copy()
        for _ in range(PASSES):
            torch.cuda._sleep(20_000_000)  # about ten milliseconds
            setup.model(x)
            torch.cuda.synchronize()
    stalled = setup.streamer.traffic.copy().stall_seconds - before.stall_seconds
    setup.streamer.remove()
    assert stalled < 0.01 * PASSES
