"""The norm of all gradients: what it is, and that an accelerator is waited for once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from offstage.stages.finetune.steps import norms_on_host, total_norm


def test_it_is_that_of_all_as_one_vector_in_float32() -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(40, 30).to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    whole = torch.cat([gradient.float().flatten() for gradient in gradients])
    assert total_norm(gradients) == pytest.approx(float(whole.norm()), rel=1e-6)
    assert total_norm([]) == 0.0


def test_of_many_numbers_in_half_precision_the_norm_is_no_further_off() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(1100, 1000).to(torch.bfloat16)
    exact = float(gradient.double().norm())
    assert float(torch.linalg.vector_norm(gradient, dtype=torch.float32)) != pytest.approx(exact, rel=1e-5)
    assert total_norm([gradient]) == total_norm([gradient.T.contiguous().T]) == pytest.approx(exact, rel=1e-5)


class Waits(TorchDispatchMode):
    """Counts what has the host wait for an accelerator: copies from there, and values that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        from_device = any(isinstance(each, torch.Tensor) and each.device.type == "cuda" for each in args)
        self.count += (
            func.namespace == "aten"
            and from_device
            and (not isinstance(result, torch.Tensor) or result.device.type == "cpu")
        )
        return result


def test_each_accelerator_is_waited_for_once_and_the_order_stays() -> None:
    with FakeTensorMode():
        gradients = [torch.empty(size, device=f"cuda:{size % 2}") for size in range(1, 8)]
        with Waits() as waits:
            norms = norms_on_host([*gradients, torch.empty(3)])
    assert waits.count == 2
    assert (norms.shape, norms.device.type, norms.dtype) == ((8,), "cpu", torch.float32)
