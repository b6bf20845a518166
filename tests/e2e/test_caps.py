"""Budgets that are worked out from a real memory cap: a cgroup, as a container has one."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from offstage.stages.machine.host_memory import Host
from offstage.stages.plan.budgets import LEAST_MARGIN, LIBRARY_BYTES, least_available
from tests.benchmarks.caps import can_cap, run_capped
from tests.benchmarks.checkpoints import make, make_mixture_like
from tests.e2e.conftest import COMMAND, HOST_RATES, environment, finish, records_in, start

MIB = 2**20
LIBRARIES = 64 * MIB
ROOMY = 2048 * MIB
"""A cap under which all weights fit."""
TOLERANCE = 0.1
UNUSED = 0.06
"""The most of a cap that no page of the run or its libraries fills at its peak."""

pytestmark = pytest.mark.skipif(not can_cap(), reason="may not make memory cgroups")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of 268 MB."""
    return make("0.1b", tmp_path_factory.mktemp("checkpoint"))


def run(folder: Path, cap: int, *arguments: str) -> dict[str, Any]:
    """Run the command under ``cap`` bytes and return its record; it must not be killed."""
    options = ("model=pretrained", HOST_RATES, "generate.prompts=[[5,6,7,8]]", "generate.max_new_tokens=4", *arguments)
    done = run_capped([*COMMAND, *options], cap, cwd=folder, env=environment())
    assert done.returncode == 0, done.stderr
    *_, record = records_in(folder).values()
    return record


def plan_of(folder: Path, cap: int, *arguments: str) -> dict[str, Any]:
    """Return the plan of a run under ``cap`` bytes that leaves the budget to be worked out."""
    return plan_in(run(folder, cap, "max_memory=null", "stages=plan_only", *arguments))


def plan_in(record: dict[str, Any]) -> dict[str, Any]:
    """Return the plan that a run's ``record`` names."""
    plan: dict[str, Any] = json.loads(Path(record["stages"][1]["artifact"], "plan.json").read_text())
    return plan


@pytest.fixture(scope="module")
def roomy(checkpoint: Path, described: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return the folder in which a short request was planned for where all weights fit, and its plan."""
    folder = tmp_path_factory.mktemp("roomy")
    shutil.copytree(described, folder / "outputs/cache")
    return folder, plan_of(folder, ROOMY, f"model.path={checkpoint}", "storage.io=direct")


@pytest.fixture
def folder(roomy: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    """Return this test's folder, whose cache knows the checkpoint and this machine."""
    shutil.copytree(roomy[0] / "outputs/cache", tmp_path / "outputs/cache")
    return tmp_path


def cap_that_leaves(share: float, plan: dict[str, Any]) -> int:
    """Return a cap under which a budget that is worked out holds about ``share`` of the weights, as ``plan`` sees it.

    What a run takes beside weights hangs on the processor's kernels; the plan's own terms say it.
    """
    terms = plan["devices"]["cpu"]["budget_terms"]
    beside = -sum(terms[name] for name in ("process", "libraries", "request"))
    weights = sum(one["weights"] for one in plan["devices"].values())
    return round((beside + share * weights) / (1 - LEAST_MARGIN))


@pytest.mark.parametrize("share", [0.4, pytest.param(0.7, marks=pytest.mark.long_form)])
def test_a_model_that_does_not_fit_under_the_cap_is_streamed_and_lives(
    share: float, checkpoint: Path, roomy: tuple[Path, dict[str, Any]], folder: Path
) -> None:
    cap = cap_that_leaves(share, roomy[1])
    record = run(folder, cap, "max_memory=null", f"model.path={checkpoint}", "storage.io=direct")
    memory = record["memory"]
    assert len(record["outputs"][0]["token_ids"]) == 4
    assert record["metrics"]["streamed_bytes_per_token"] > 0
    left = cap - memory["measured"]["cpu"]
    assert LIBRARIES < left <= LIBRARY_BYTES + UNUSED * cap, "what libraries' pages need is left, and little to nobody"
    assert memory["measured"]["cpu"] == pytest.approx(memory["predicted"]["cpu"], rel=TOLERANCE)


def test_the_automatic_budget_stays_below_the_cap_and_says_why(roomy: tuple[Path, dict[str, Any]]) -> None:
    plan = roomy[1]
    terms = plan["devices"]["cpu"]["budget_terms"]
    assert set(terms) == {"available", "process", "libraries", "request", "margin"}
    assert terms["available"] <= ROOMY
    assert plan["devices"]["cpu"]["budget"] == sum(terms.values()) < ROOMY + terms["process"] + terms["libraries"]


@pytest.mark.long_form
def test_a_cap_with_room_for_nothing_to_spare_is_lived_under(
    checkpoint: Path, roomy: tuple[Path, dict[str, Any]], folder: Path
) -> None:
    """CI has the plan on a described host in ``test_stage``."""
    terms = roomy[1]["devices"]["cpu"]["budget_terms"]
    beside = -sum(terms[name] for name in ("process", "request"))
    needed = beside + sum(one["weights"] for one in roomy[1]["devices"].values()) // 3
    cap = round(least_available(needed, Host(ROOMY, ROOMY, limit="a cap")))
    record = run(folder, cap, "max_memory=null", f"model.path={checkpoint}")
    assert len(record["outputs"][0]["token_ids"]) == 4
    assert record["memory"]["measured"]["cpu"] < cap
    refused = run_capped(
        [*COMMAND, "model=pretrained", f"model.path={checkpoint}", "stages=plan_only", "generate.prompts=[[5,6,7]]"],
        beside + 10 * MIB, cwd=folder, env=environment(),
    )  # fmt: skip
    assert refused.returncode == 4, refused.stderr
    assert "memory.limit_in_bytes: " in refused.stderr or "memory.max: " in refused.stderr
    assert "max_memory" not in refused.stderr


@pytest.mark.long_form
def test_a_budget_that_the_cap_cannot_hold_is_refused_before_a_weight_is_read(checkpoint: Path, folder: Path) -> None:
    """CI has the refusal on a described host in ``test_predictions``, and the cap as the host's memory above."""
    given = ("model=pretrained", f"model.path={checkpoint}", "max_memory.cpu=300MB", "generate.prompts=[[5,6,7]]")
    arguments = [*COMMAND, *given]
    done = run_capped(arguments, 450 * MIB, cwd=folder, env=environment())
    assert done.returncode == 4, done.stderr
    assert "max_memory.cpu: the plan takes" in done.stderr
    assert "the most that works is" in done.stderr
    assert not list(folder.glob("outputs/cache/shard_load/*"))


@pytest.mark.long_form
def test_long_prompts_get_their_room_before_the_weights_do(checkpoint: Path, folder: Path) -> None:
    prompts = str([[7] * 900, [9] * 500])
    given = ("model=pretrained", f"model.path={checkpoint}", "storage.io=direct", "max_memory=null")
    asked = (*given, f"generate.prompts={prompts}", "generate.max_new_tokens=4")
    planned = finish(start(folder, *asked, "stages=plan_only"), folder, {})
    cap = cap_that_leaves(0.7, plan_in(planned.record))
    record = run(folder, cap, *asked)
    memory = record["memory"]
    assert record["metrics"]["streamed_bytes_per_token"] > 0, "the request took nothing from the weights"
    assert memory["predicted"]["cpu"] == pytest.approx(memory["measured"]["cpu"], rel=TOLERANCE)


@pytest.mark.long_form
def test_a_mixture_lives_under_what_was_predicted_and_5_percent(folder: Path, tmp_path: Path) -> None:
    """CI caps it at what its plan allows: see ``test_predictions``."""
    checkpoint = make_mixture_like("qwen3-moe", tmp_path / "checkpoint")
    given = (f"model.path={checkpoint}", "storage.io=direct", "max_memory.cpu=60MB")
    planned = run(folder, ROOMY, "stages=plan_only", *given)
    shutil.rmtree(folder / "outputs/runs")
    record = run(folder, round(1.05 * planned["memory"]["predicted"]["cpu"]), *given)
    assert len(record["outputs"][0]["token_ids"]) == 4
