"""Two records held against each other."""

from typing import Any

import pytest

from offstage.pipeline.decoding import decode
from offstage.pipeline.replay import Difference, compare, first_difference
from offstage.pipeline.run_schema import Run


def outputs(*rows: list[int]) -> list[dict[str, Any]]:
    return [{"token_ids": row} for row in rows]


@pytest.mark.parametrize(
    ("then", "now", "expected"),
    [
        (outputs([1, 2]), outputs([1, 2]), None),
        (outputs([1, 2]), outputs([1, 3]), Difference(0, 1, 2, 3)),
        (outputs([1], [2]), outputs([1], [3]), Difference(1, 0, 2, 3)),
        (outputs([1, 2]), outputs([1]), Difference(0, 1, 2, None)),
        (outputs([1]), outputs([1], [4]), Difference(1, 0, None, 4)),
        (outputs([1]), outputs([1], []), Difference(1, 0, None, None)),
        ([], [], None),
        ([{"name": "a", "sha256": "1"}], [{"name": "a", "sha256": "1"}], None),
        ([{"name": "a", "sha256": "1"}], [{"name": "a", "sha256": "2"}], Difference(0, "a sha256", "1", "2")),
        ([{"score": [1.5, 2]}], [{"score": [1.5, 3]}], Difference(0, "score", [1.5, 2], [1.5, 3])),
    ],
)
def test_the_first_output_that_differs_is_found(then: Any, now: Any, expected: Difference | None) -> None:
    assert first_difference(then, now) == expected


def record(**changes: Any) -> Run:
    plan = {"name": "plan", "inputs": {"budgets": [["cpu", 10]], "skeleton": "abc"}}
    base = {"outputs": outputs([1, 2]), "device_map": {"a": "cpu"}, "stages": [plan], "environment": {"torch": "2"}}
    return decode(Run, {"status": "completed", **base, "metrics": {"load_seconds": 1.0}, **changes}, "lenient")


def test_equal_records_are_the_same() -> None:
    comparison = compare(record(), record())
    assert comparison.same
    assert (comparison.moved, comparison.why, comparison.environment) == ((), (), ())


def test_what_moved_and_why_is_named_and_tokens_decide() -> None:
    plan = {"name": "plan", "inputs": {"budgets": [["cpu", 20]], "skeleton": "other"}}
    comparison = compare(record(), record(device_map={"a": "disk"}, stages=[plan], environment={"torch": "3"}))
    assert comparison.same
    assert [change.place for change in comparison.moved] == ["a"]
    assert [change.place for change in comparison.why] == ["plan.budgets[0]"], (
        "a skeleton that differs is told by its stage"
    )
    assert [change.place for change in comparison.environment] == ["torch"]


def test_without_tokens_the_plan_decides() -> None:
    comparison = compare(record(outputs=[]), record(outputs=[], device_map={"a": "disk"}))
    assert not comparison.kind
    assert not comparison.same


def test_a_record_of_before_the_inputs_were_kept_has_nothing_to_tell_about_them() -> None:
    assert compare(record(stages=[{"name": "plan"}]), record()).why == ()


@pytest.mark.parametrize(
    ("then", "now", "moved"),
    [
        ({"": "cpu"}, {"": "disk"}, [("the model", "cpu", "disk")]),
        ({"": "cpu"}, {"a": "cpu", "b.c": "disk", "b.d": "cpu"}, [("b.c", "cpu", "disk")]),
        ({"a": 0, "b": "cpu"}, {"": "cpu"}, [("a", 0, "cpu")]),
        ({"b": "cpu", "b.c": "disk"}, {"b": "disk"}, [("b", "cpu", "disk")]),
        ({"": "cpu"}, {}, [("the model", "cpu", None)]),
    ],
)
def test_maps_that_name_parts_of_other_sizes_are_compared_by_what_lies_where(
    then: dict[str, Any], now: dict[str, Any], moved: list[tuple[Any, ...]]
) -> None:
    changes = compare(record(device_map=then), record(device_map=now)).moved
    assert [(change.place, change.then, change.now) for change in changes] == moved
