"""Plain data is gone through in its order, every node with its place."""

from typing import Any

from pipeline.plain_data import leaves, walk


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
