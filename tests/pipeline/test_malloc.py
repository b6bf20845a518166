"""Freed memory goes back to the system: in a process of its own, since an allocator can't be set back."""

import subprocess
import sys

import pytest

CODE = """
import re, sys
from pathlib import Path
from offstage.pipeline.malloc import return_freed_memory

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
    done = subprocess.run([sys.executable, "-c", CODE, *arguments], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="the C library's own setting")
def test_what_is_freed_is_given_back() -> None:
    assert given_back("set") > 0.95 * 144_000_000
