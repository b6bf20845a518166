"""What rests packed is unpacked on a real accelerator to the bits of the host, and nothing waits for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from offstage.stages.checkpoints.device_codec import can_unpack
from offstage.stages.checkpoints.packed import PackedTensor
from offstage.stages.checkpoints.readers import read_extent
from offstage.stages.machine.devices import Devices
from tests.cuda.test_streaming import no_synchronising
from tests.stages.checkpoints.device_unpacking import TENSORS, same_numbers, unpacked_on
from tests.stages.dispatch.placed_models import LAYOUTS, Setup, net
from tests.stages.packed_models import TorchScaledRows, quantised, to_packed

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
    pytest.mark.filterwarnings("ignore:invalid value"),
]


UNPACKED_THERE = {name: tensor for name, tensor in TENSORS.items() if can_unpack(tensor)}


@pytest.mark.parametrize("tensor", UNPACKED_THERE.values(), ids=UNPACKED_THERE)
def test_an_accelerator_unpacks_to_the_bits_that_the_host_unpacks_to(tensor: PackedTensor) -> None:
    for dtype in ("bfloat16", "float16", "float32"):
        wanted = replace(tensor, dtype=dtype)
        assert same_numbers(unpacked_on(wanted, torch.device("cuda:0")), read_extent(wanted))


@pytest.mark.parametrize("layout", ["disk", "mixed"])
def test_what_is_streamed_packed_computes_as_what_is_resident_and_nothing_waits(layout: str, tmp_path: Path) -> None:
    codec, width = TorchScaledRows(block_rows=400), 1024
    x = torch.randn(3, width)
    wanted = quantised(net(width), codec).to("cuda:0")(x.to("cuda:0"))
    setup = Setup(
        quantised(net(width), codec),
        LAYOUTS[layout],
        tmp_path,
        devices=Devices(),
        example=x,
        store=to_packed(codec),
        unpacking={0: 64 * 2**20},
    )
    given = x.to("cuda:0")
    for _ in range(2):
        assert torch.equal(setup.model(given), wanted)
    with no_synchronising():
        again = setup.model(given)
    assert torch.equal(again, wanted)
    assert setup.streamer.traffic.links[0].bytes == setup.streamer.traffic.streamed_bytes
    setup.streamer.remove()
