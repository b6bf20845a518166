"""Offload of activations: the gradients stay the same bits, and what isn't a share is refused."""

from typing import Any

import pytest
import torch
from torch import nn

from pipeline.errors import ConfigError
from stages.finetune import CPUOffload
from stages.machine.devices import Devices


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.GELU())))


@pytest.mark.parametrize("ratio", [0, 0.1, 0.5, 1.0])
def test_gradients_are_the_same_bits_at_any_ratio(ratio: float) -> None:
    inputs = torch.randn(64, 32)
    plain, offloaded = net(), net()
    plain(inputs).square().sum().backward()
    with CPUOffload(ratio, "net", devices=Devices({0: 2**30})) as offload:
        loss = offloaded(inputs).square().sum()
    loss.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), offloaded.parameters(), strict=True))
    assert offload.traffic["net"].ratio == pytest.approx(ratio, abs=0.05)


@pytest.mark.parametrize("ratio", [-0.1, 1.5, float("nan"), float("inf"), "0.5", True, None])
def test_a_ratio_that_is_no_share_is_refused_as_the_context_is_made(ratio: Any) -> None:
    with pytest.raises(ConfigError, match=r"offload_ratio: .* from 0 \(all stay\) to 1 \(all go\)"):
        CPUOffload(ratio)


@pytest.mark.parametrize("tag", ["", None, 3])
def test_a_tag_that_names_nothing_is_refused(tag: Any) -> None:
    with pytest.raises(ConfigError, match=r"tag: .* names nothing"):
        CPUOffload(0.1, tag)
