"""Libraries keep little: in processes of their own, since an allocator can't be set back and caches look once."""

import subprocess
import sys

import pytest

from offstage.pipeline.kept_memory import CAPACITY, WITHOUT_CUDNN_ATTENTION, bound_kernel_caches

CODE = """
import re
from pathlib import Path
import torch
from offstage.pipeline.kept_memory import bound_kernel_caches

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


FREES = """
import re, sys
from pathlib import Path
from offstage.pipeline.kept_memory import return_freed_memory

def held():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

if "set" in sys.argv:
    assert return_freed_memory()
for _ in range(2):  # by default a first free raises the size up to which blocks are kept
    blocks = [bytearray(b"x") * 12_000_000 for _ in range(12)]
    pins = [bytearray(100_000) for _ in range(3)]
    before = held()
    del blocks
print(before - held())
"""


def given_back(*arguments: str) -> int:
    done = subprocess.run([sys.executable, "-c", FREES, *arguments], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="the C library's own setting")
def test_what_is_freed_is_given_back() -> None:
    assert given_back("set") > 0.95 * 144_000_000
