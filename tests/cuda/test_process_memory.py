"""A run with an accelerator holds what its plan says, its context and its libraries' workspaces included."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
]

ASKS = """
import torch
from offstage.stages.machine.hardware import local_accelerators
found = local_accelerators()
assert len(found) == torch.cuda.device_count()
for index, device in enumerate(found):
    assert 0 < device.free_bytes <= device.total_bytes
    assert device.has_context == torch._C._cuda_hasPrimaryContext(index)
    free = torch.cuda.mem_get_info(index)[0]
    assert device.has_context or 0 < device.free_bytes - free < 2 * 10**9, "what a context takes"
print([device.has_context for device in found])
"""


def test_what_is_free_is_asked_without_making_a_context() -> None:
    pytest.importorskip("pynvml")
    done = subprocess.run([sys.executable, "-c", ASKS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "True" not in done.stdout


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_holds_on_host_and_device_what_is_predicted(dtype: str, tmp_path: Path) -> None:
    program = "from offstage.pipeline.commands import offstage; offstage()"
    asked = ["max_memory={0: 6MB, cpu: 32MB}", f"dtype={dtype}", "generate.max_new_tokens=8"]
    command = [sys.executable, "-c", program, *asked]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    memory = json.loads(next(tmp_path.glob("outputs/runs/*/*/run.json")).read_text())["memory"]
    for device in ("0", "cpu"):
        predicted, measured = memory["predicted"][device], memory["measured"][device]
        assert 0.75 * predicted <= measured <= 1.05 * predicted, (device, memory)
