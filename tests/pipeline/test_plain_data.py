"""Plain data is gone through in its order, every node with its place."""

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from offstage.pipeline.plain_data import DEEPEST, as_json, leaves, scalars, unrecordable, walk


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
        ({"vars": {"a": [1, {2}]}}, "vars.a[1]", "a value of type set stands in no record"),
        (nested(DEEPEST + 1), "vars", f"nested more than {DEEPEST} deep"),
        (nested(5_000), "vars", f"nested more than {DEEPEST} deep"),
    ],
)
def test_what_no_record_can_hold_is_told_with_its_place(data: Any, place: str, why: str) -> None:
    ((key_path, said),) = unrecordable(data)
    assert key_path == place
    assert why in said


def test_what_a_record_can_hold_is_nothing_to_tell() -> None:
    assert [*unrecordable({"a": [1, "b", None, 1.5, True, (2, {})], "deep": nested(DEEPEST - 1)["vars"]})] == []


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(plain, st.integers(0, 4))
def test_json_says_what_the_data_is_with_lists_of_scalars_in_a_line(data: Any, indent: int) -> None:
    text = as_json(data, indent=indent)
    assert json.loads(text) == json.loads(json.dumps(data))
    assert text.endswith("\n")


def test_json_has_millions_of_tokens_in_a_line_each_and_else_an_entry_a_line() -> None:
    record = {"outputs": [{"token_ids": [1, 2], "more": {}}], "series": [[0.5, 1], [1.0, 2]], 1: (None, True)}
    assert as_json(record).splitlines() == [
        "{",
        '  "outputs": [',
        "    {",
        '      "token_ids": [1, 2],',
        '      "more": {}',
        "    }",
        "  ],",
        '  "series": [',
        "    [0.5, 1],",
        "    [1.0, 2]",
        "  ],",
        '  "1": [null, true]',
        "}",
    ]


def test_scalars_are_all_that_has_nothing_in_itself() -> None:
    assert sorted(map(str, scalars({"a": [1, {"b": "x"}, []], "c": None}))) == ["1", "None", "x"]
