"""Kernels compiled for shapes that don't come back are forgotten: in a process of its own, since caches look once."""

import subprocess
import sys

import pytest

from offstage.pipeline.kernel_caches import CAPACITY, WITHOUT_CUDNN_ATTENTION, bound_kernel_caches

CODE = """
import re
from pathlib import Path
import torch
from offstage.pipeline.kernel_caches import bound_kernel_caches

def held():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def multiply(lengths):
    for length in lengths:
        torch.zeros(8, 1, 64, dtype=torch.bfloat16) @ torch.zeros(8, 64, length, dtype=torch.bfloat16)

bound_kernel_caches()
multiply(range(8, 40))
before = held()
multiply(range(40, 160))
print(held() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks the system what is held")
def test_products_of_ever_other_shapes_dont_make_the_process_grow() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 30e6, "0.66 MB for each of 120 shapes where oneDNN compiles them"


def test_what_the_environment_says_counts() -> None:
    nothing: dict[str, str] = {}
    bound_kernel_caches(nothing)
    assert nothing.pop(WITHOUT_CUDNN_ATTENTION) == "1"
    assert list(nothing.values()) == [str(CAPACITY)] * 2
    mine = {WITHOUT_CUDNN_ATTENTION: "0", "LRU_CACHE_CAPACITY": "7", "DNNL_PRIMITIVE_CACHE_CAPACITY": "9"}
    asked = dict(mine)
    bound_kernel_caches(asked)
    assert asked == mine
