"""A plan for a machine that the config describes: nothing of the one that makes it goes into it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from offstage.stages.machine import kernels, process_memory, rates
from offstage.stages.machine.host_memory import PROCESS_BYTES
from tests.e2e.conftest import Finished

Run = Callable[..., Finished]
FIGURES = (process_memory.FILE_NAME, kernels.FILE_NAME, rates.FILE_NAME, rates.DECODING_NAME)
PLANS = {
    "to generate": ("stages=plan_only",),
    "on the host alone": ("stages=plan_only", "hardware.devices=[]"),
    "several in lockstep": ("stages=plan_only", "generate.lockstep=auto", "generate.prompts=[[1,2],[3],[4,5]]"),
    "to train": ("stages=finetune", "stop_after=plan", "finetune.text_file=words.txt"),
}


@pytest.mark.parametrize("asked", PLANS.values(), ids=PLANS)
def test_a_plan_for_another_machine_measures_nothing_of_this_one(
    asked: tuple[str, ...], offstage_here: Run, fresh_folder: Path
) -> None:
    figures = fresh_folder / "outputs/cache/hardware"
    shutil.rmtree(figures)
    fresh_folder.joinpath("words.txt").write_text("some words to learn by heart\n" * 100)
    done = offstage_here("hardware=8x80gb", "max_memory=null", *asked)
    assert done.code == 0, done.err
    asked_for = [file.name for file in figures.glob("*")]  # with the locks of what is measured, kept or not
    assert not [name for name in asked_for if any(figure in name for figure in FIGURES)]
    plan = json.loads(Path(done.record["stages"][1]["artifact"], "plan.json").read_text())
    assert plan["devices"]["cpu"]["ledger"]["process"] >= PROCESS_BYTES
    assert any(note.startswith("hardware.host is described: a process is taken to hold") for note in plan["notes"])


def test_it_is_the_same_plan_wherever_it_is_made(offstage_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("stages=plan_only", "hardware=8x80gb", "max_memory=null")
    first = offstage_here(*asked)
    assert first.code == 0, first.err
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(kernels, "processor_features", lambda: "another processor")
    monkeypatch.setattr(process_memory, "identity", lambda: "other libraries")
    again = offstage_here(*asked)
    assert all(again.cached.values())
    assert [stage["key"] for stage in again.record["stages"]] == [stage["key"] for stage in first.record["stages"]]
