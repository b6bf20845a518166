"""The number that a run comes to: which of its record's, and within which limits."""

from dataclasses import replace
from typing import Any

import pytest

from offstage.pipeline.errors import ConfigError
from offstage.pipeline.objective import Objective, UnmeasuredError, check_objective, objective_of, require_numbers
from offstage.pipeline.run_schema import Run, RunMemory


def record(**objective: Any) -> Run:
    metrics = {
        "decode_seconds_per_token": 0.4,
        "bottleneck": "storage",
        "perplexity": None,
        "streamed_bytes_per_token": 8,
    }
    memory = RunMemory(budget={"cpu": 2_000_000_000, "disk": None}, measured={"cpu": 3_000_000_000})
    parts: Any = {"config": {"objective": objective}, "metrics": metrics, "memory": memory, "environment": {}}
    return Run(status="completed", overrides=(), stages=(), outputs=(), **parts)


def objective_with(**objective: Any) -> Objective:
    said = objective_of(record(**objective))
    assert said is not None
    return said


def test_a_number_is_a_metric_or_what_a_device_was_allowed_or_held() -> None:
    assert objective_with(metric="decode_seconds_per_token").value == 0.4
    assert objective_with(metric="memory.budget.cpu").value == 2e9
    assert objective_with(metric="memory.measured.cpu").value == 3e9
    assert objective_of(record()) is None
    assert objective_of(replace(record(), config={})) is None, "a record from before there were any"


@pytest.mark.parametrize(
    ("side", "bound", "excess"), [("at_most", 0.5, -0.2), ("at_most", 0.2, 1.0), ("at_least", 0.5, 0.2)]
)
def test_a_limit_is_kept_or_passed_by_a_share_of_itself(side: str, bound: float, excess: float) -> None:
    said = objective_with(metric="memory.budget.cpu", **{side: {"decode_seconds_per_token": bound}})
    assert said.limits[0].excess == pytest.approx(excess)
    assert said.is_within is (excess <= 0)


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        ({"metric": "decode_seconds_per_tokn"}, r"objective.metric: .*did you mean 'decode_seconds_per_token'"),
        ({"metric": "bottleneck"}, "has no number 'bottleneck'"),
        ({"metric": "perplexity"}, "has no number 'perplexity'"),
        ({"metric": "memory.budget.disk"}, "has no number 'memory.budget.disk'"),
        ({"metric": "memory.budget.cpu", "at_most": {"loss": 1}}, "objective.at_most: .*'loss'"),
    ],
)
def test_a_number_that_the_record_lacks_is_said_with_the_closest_that_it_has(
    objective: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        objective_of(record(**objective))


@pytest.mark.parametrize(
    ("objective", "key"),
    [
        ({"metric": "generate.seconds"}, "objective.metric"),
        ({"metric": "memory.held.cpu"}, "objective.metric"),
        ({"metric": ""}, "objective.metric"),
        ({"at_most": {"load_seconds": 1}}, "objective.at_most"),
        ({"metric": "load_seconds", "at_least": {"load_seconds": "fast"}}, "objective.at_least.load_seconds"),
        ({"metric": "load_seconds", "at_most": {"load_seconds": 0}}, "objective.at_most.load_seconds"),
        ({"metric": "load_seconds", "at_most": {"memory.cpu": 1}}, "objective.at_most"),
    ],
)
def test_what_no_record_can_have_is_refused_before_there_is_one(objective: dict[str, Any], key: str) -> None:
    assert [fault.key for fault in check_objective({"objective": objective})] == [key]


def test_a_metric_that_a_run_came_to_no_value_of_is_told_from_a_name_that_is_none() -> None:
    with pytest.raises(UnmeasuredError, match="has no number 'perplexity'"):
        objective_of(record(metric="perplexity"))
    require_numbers(record(metric="perplexity"))
    with pytest.raises(ConfigError, match="did you mean"):
        require_numbers(record(metric="decode_seconds_per_tokn"))
