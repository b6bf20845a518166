"""Plain data is gone through in its order, every node with its place."""

from typing import Any

import pytest

from offstage.pipeline.plain_data import DEEPEST, leaves, unrecordable, walk


def test_every_node_comes_with_its_place_and_before_what_is_in_it() -> None:
    data = {"model": {"layers": [{"size": 3}, "text"], "empty": {}}, "seed": 0}
    assert dict(walk(data)) == {
        "": data,
        "model": data["model"],
        "model.layers": [{"size": 3}, "text"],
        "model.layers[0]": {"size": 3},
        "model.layers[0].size": 3,
        "model.layers[1]": "text",
        "model.empty": {},
        "seed": 0,
    }
    assert [place for place, _ in walk((1, [2, 3]), "at")] == ["at", "at[0]", "at[1]", "at[1][0]", "at[1][1]"]


def test_no_depth_is_too_much() -> None:
    deep: Any = 1
    for _ in range(5_000):
        deep = [deep]
    assert [node for _, node in walk(deep)][-1] == 1


def test_leaves_stand_under_dotted_keys() -> None:
    assert dict(leaves({"a": {"b": 1, "c": {}}, "d": [1]})) == {"a.b": 1, "a.c": {}, "d": [1]}


def nested(depth: int) -> dict[str, Any]:
    value: Any = 1
    for _ in range(depth):
        value = {"x": value}
    return {"vars": value}


@pytest.mark.parametrize(
    ("data", "place", "why"),
    [
        ({"vars": {"a": [1, b"x"]}}, "vars.a[1]", "are bytes"),
        ({"vars": {"a": {b"x": 1}}}, "vars.a.b'x'", "are bytes"),
        (nested(DEEPEST + 1), "vars", f"nested more than {DEEPEST} deep"),
        (nested(5_000), "vars", f"nested more than {DEEPEST} deep"),
    ],
)
def test_what_no_record_can_hold_is_told_with_its_place(data: Any, place: str, why: str) -> None:
    ((found, said),) = unrecordable(data)
    assert found == place
    assert why in said


def test_what_a_record_can_hold_is_nothing_to_tell() -> None:
    assert [*unrecordable({"a": [1, "b", None, 1.5, True, (2, {})], "deep": nested(DEEPEST - 1)["vars"]})] == []
