"""Budgets that are worked out from a real memory cap: a cgroup, as a container has one."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.caps import can_cap, run_capped
from tests.benchmarks.checkpoints import make
from tests.e2e.conftest import COMMAND, environment

MIB = 2**20
LIBRARIES = 64 * MIB
TOLERANCE = 0.1

pytestmark = pytest.mark.skipif(not can_cap(), reason="may not make memory cgroups")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of 268 MB."""
    return make("0.1b", tmp_path_factory.mktemp("checkpoint"))


def run(folder: Path, cap: int, *arguments: str) -> dict[str, Any]:
    """Run the command under ``cap`` bytes and return its record; it must not be killed."""
    options = ("model=pretrained", "generate.prompts=[[5,6,7,8]]", "generate.max_new_tokens=4", *arguments)
    done = run_capped([*COMMAND, *options], cap, cwd=folder, env=environment())
    assert done.returncode == 0, done.stderr
    record: dict[str, Any] = json.loads(next(folder.glob("outputs/runs/*/*/run.json")).read_text())
    return record


@pytest.mark.parametrize("cap", [768 * MIB, 832 * MIB])
def test_a_model_that_does_not_fit_under_the_cap_is_streamed_and_lives(
    cap: int, checkpoint: Path, tmp_path: Path
) -> None:
    record = run(tmp_path, cap, f"model.path={checkpoint}", "max_memory=null", "storage.io=direct")
    memory = record["memory"]
    assert len(record["outputs"][0]["token_ids"]) == 4
    assert record["metrics"]["streamed_bytes_per_token"] > 0
    assert memory["measured"]["cpu"] < cap - LIBRARIES
    assert memory["measured"]["cpu"] == pytest.approx(memory["predicted"]["cpu"], rel=TOLERANCE)


def test_the_automatic_budget_stays_below_the_cap_and_says_why(checkpoint: Path, tmp_path: Path) -> None:
    cap = 2048 * MIB
    record = run(tmp_path, cap, f"model.path={checkpoint}", "max_memory=null", "stages=plan_only")
    plan = json.loads(Path(record["stages"][1]["artifact"], "plan.json").read_text())
    terms = plan["budget_terms"]["cpu"]
    assert set(terms) == {"available", "process", "libraries", "request", "margin"}
    assert terms["available"] <= cap
    assert plan["budgets"]["cpu"] == sum(terms.values()) < cap - 580 * 10**6


def test_a_budget_that_the_cap_cannot_hold_is_refused_before_a_weight_is_read(checkpoint: Path, tmp_path: Path) -> None:
    arguments = [*COMMAND, "model=pretrained", f"model.path={checkpoint}", "max_memory.cpu=300MB"]
    done = run_capped(arguments, 450 * MIB, cwd=tmp_path, env=environment())
    assert done.returncode == 4, done.stderr
    assert "max_memory.cpu: the plan takes" in done.stderr
    assert "the most that works is" in done.stderr
    assert not list(tmp_path.glob("outputs/cache/shard_load/*"))


def test_long_prompts_get_their_room_before_the_weights_do(checkpoint: Path, tmp_path: Path) -> None:
    prompts = str([[7] * 1500, [9] * 900])
    given = (f"model.path={checkpoint}", "max_memory=null", "storage.io=direct", f"generate.prompts={prompts}")
    record = run(tmp_path, 1000 * MIB, *given)
    memory = record["memory"]
    assert memory["budget"]["cpu"] < 200 * 10**6, "the request left the weights too much: the test proves nothing"
    assert memory["predicted"]["cpu"] == pytest.approx(memory["measured"]["cpu"], rel=TOLERANCE)
