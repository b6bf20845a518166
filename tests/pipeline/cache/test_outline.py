"""What a key stands for, kept so that a difference can be named."""

import json
import math
from pathlib import Path

import pytest

from offstage.pipeline.cache.outline import Change, changes, outline


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"a": 1, "b": (True, None, 1.5)}, {"a": 1, "b": [True, None, 1.5]}),
        ({"path": Path("/x")}, {"path": "/x"}),
        (math.inf, "inf"),
        ("short", "short"),
    ],
)
def test_what_is_short_stands_for_itself(value: object, expected: object) -> None:
    assert outline(value) == expected
    json.dumps(outline(value), allow_nan=False)


@pytest.mark.parametrize("value", [b"bytes", "x" * 201, list(range(2001)), {1, 2}])
def test_what_is_long_or_has_no_json_is_hashed(value: object) -> None:
    assert str(outline(value)).startswith("sha256:")


@pytest.mark.parametrize(
    ("then", "now", "expected"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": {"b": 1}}, {"a": {"b": 2}}, [Change("a.b", 1, 2)]),
        ({"a": 1}, {}, [Change("a", 1, None)]),
        ({"files": [["x", 1], ["y", 2]]}, {"files": [["x", 1], ["y", 3]]}, [Change("files[1]", ["y", 2], ["y", 3])]),
        ({"ids": [1, 2]}, {"ids": [1, 3]}, [Change("ids", [1, 2], [1, 3])]),
        ({"files": [["x"]]}, {"files": [["x"], ["y"]]}, [Change("files", [["x"]], [["x"], ["y"]])]),
    ],
)
def test_a_difference_is_named_as_deep_as_it_can_be(then: object, now: object, expected: list[Change]) -> None:
    assert list(changes(then, now)) == expected
