"""Attention is computed by a kernel that serves any length, also where torch would prefer one planned for each."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from offstage.pipeline.kept_memory import WITHOUT_CUDNN_ATTENTION

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
]

CODE = """
from offstage.pipeline.kept_memory import bound_kernel_caches
bound_kernel_caches()
import torch
from torch.profiler import ProfilerActivity, profile
row = torch.zeros(1, 8, 1, 64, device="cuda", dtype=torch.bfloat16)
past = torch.zeros(1, 8, 37, 64, device="cuda", dtype=torch.bfloat16)
with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU]) as profiler:
    torch.nn.functional.scaled_dot_product_attention(row, past, past)
print(any("cudnn" in event.name for event in profiler.events()))
"""


def takes_cudnn(code: str) -> bool:
    """Return whether attention is cuDNN's in a process that runs ``code``."""
    environment = {key: value for key, value in os.environ.items() if key != WITHOUT_CUDNN_ATTENTION}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()[-1] == "True"


def test_no_attention_is_planned_for_its_length() -> None:
    assert not takes_cudnn(CODE)


def test_without_a_word_it_would_be() -> None:
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("torch prefers other kernels on this device")
    assert takes_cudnn(CODE.replace("\nbound_kernel_caches()", "")), "else the other test shows nothing"
