"""Torch's allocator on a real accelerator reserves what its model says, with segments that expand and without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from offstage.pipeline.environment import ALLOCATOR_SETTINGS

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
]

COMPARES = """
import random, sys
import torch
from offstage.stages.machine.caching_allocator import UNPACKING
from offstage.stages.machine.expandable_segments import are_on, caching_allocator
MIB = 2**20
streams = {0: torch.cuda.current_stream(), UNPACKING: torch.cuda.Stream()}
for seed in range(3):
    chance, model, held = random.Random(seed), caching_allocator(expands=are_on()), []
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0
    for step in range(300):
        if held and chance.random() < 0.45:
            tensor, block = held.pop(chance.randrange(len(held)))
            del tensor
            model.free(block)
        else:
            size = chance.choice([700, 80_000, 900_000, 3 * MIB, 7 * MIB + 100, 14 * MIB, 33 * MIB])
            stream = chance.choice([0, UNPACKING])
            with torch.cuda.stream(streams[stream]):
                held.append((torch.empty(size, dtype=torch.uint8, device="cuda"), model.allocate(size, stream)))
        now = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        assert now == (model.allocated, model.reserved), (seed, step, now, model.allocated, model.reserved)
    held.clear()
"""


def without_settings(**settings: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ALLOCATOR_SETTINGS}
    return kept | settings


@pytest.mark.parametrize("settings", ["expandable_segments:False", "expandable_segments:True"])
def test_each_block_reserves_what_the_model_of_the_allocator_says(settings: str) -> None:
    environment = without_settings(PYTORCH_CUDA_ALLOC_CONF=settings)
    done = subprocess.run(
        [sys.executable, "-c", COMPARES], env=environment, capture_output=True, text=True, check=False
    )
    if "not supported" in done.stderr:
        pytest.skip("its segments can't expand")
    assert done.returncode == 0, done.stderr


def test_a_run_says_which_settings_it_had_and_reserves_no_more_than_is_predicted(tmp_path: Path) -> None:
    program = "from offstage.pipeline.commands import offstage; offstage()"
    command = [sys.executable, "-c", program, "max_memory={0: 6MB, cpu: 32MB}", "generate.max_new_tokens=8"]
    done = subprocess.run(command, cwd=tmp_path, env=without_settings(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads(next(tmp_path.glob("outputs/runs/*/*/run.json")).read_text())
    assert record.get("allocator") in (None, "expandable_segments:True")
    assert record["memory"]["reserved"]["0"] <= record["memory"]["predicted"]["0"]
