"""What a run says of its plan is so: why an accelerator is idle, how large the model is."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Finished

Run = Callable[..., Finished]
PLAN = "stop_after=plan"


def plan_of(done: Finished) -> dict[str, Any]:
    """Return the plan that a run left."""
    plan: dict[str, Any] = json.loads(Path(done.record["stages"][1]["artifact"], "plan.json").read_text())
    return plan


@pytest.mark.parametrize(
    ("given", "word"),
    [
        (["device_map={cpu_offload_gb: 0.002}", "max_memory=null"], "device_map (cpu_offload_gb) puts none there"),
        (["device_map={model: 0, model.layers.0: cpu}", "max_memory=null"], "device_map (explicit) puts none there"),
        (
            ["device_map=sequential", "max_memory={0: 3MB, 1: 50KB, cpu: 8MB}"],
            "its budget is too small for a layer",
        ),
    ],
    ids=["asked to offload", "a map", "too small"],
)
def test_an_idle_accelerator_is_explained(given: list[str], word: str, offstage_here: Run) -> None:
    done = offstage_here(PLAN, "hardware=2x24gb", *given)
    assert done.code == 0, done.err
    notes = [note for note in plan_of(done)["notes"] if "holds no weights" in note]
    assert notes == [f"accelerator 1 holds no weights: {word}"]


def test_a_layer_that_was_asked_away_is_not_said_to_be_where_the_accelerators_are_full(offstage_here: Run) -> None:
    machine = ("hardware=2x24gb", "max_memory=null")
    asked = plan_of(offstage_here(PLAN, *machine, "device_map={cpu_offload_gb: 0.002}"))["reasons"]
    assert asked["model.layers.0"].endswith("on cpu, streamed to 0: cpu_offload_gb asks for it")
    mapped = plan_of(offstage_here(PLAN, *machine, "device_map={model: 0, model.layers.0: cpu}"))["reasons"]
    assert mapped["model.layers.0"].endswith("on cpu, streamed to 0: the map says so")


def test_a_map_of_one_entry_is_a_row_of_the_size_of_the_model(offstage_here: Run) -> None:
    done = offstage_here(PLAN, "device_map={model: cpu}", "max_memory=null")
    assert done.code == 0, done.err
    row = next(line for line in done.out.splitlines() if line.startswith("the model"))
    assert row.split()[-2:] == ["7.48", "MB"], "the head and the embedding are one tensor"
    assert plan_of(done)["devices"]["cpu"]["weights"] == 7_477_760
    assert done.record["device_map"] == {"": "cpu"}


def test_a_plan_for_another_machine_predicts_that_host_and_a_run_the_one_that_stands_in_for_it(
    offstage_here: Run,
) -> None:
    machine = ("hardware=2x24gb", "max_memory=null", "generate.max_new_tokens=2", "generate.min_new_tokens=2")
    planned = offstage_here("stages=plan_only", *machine).record["memory"]
    alone = offstage_here("stages=plan_only", *machine, "device_map=cpu").record["memory"]
    assert planned["predicted"]["cpu"] < alone["predicted"]["cpu"], "its weights lie on accelerators, which have them"
    ran = offstage_here("stop_after=dispatch", *machine).record["memory"]
    assert planned["simulated"]["cpu"] > planned["predicted"]["cpu"] + 7_477_760
    assert ran["predicted"]["cpu"] == planned["simulated"]["cpu"]
