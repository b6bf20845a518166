from __future__ import annotations

import copy
import itertools
import json
import math
import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from enum import Enum, Flag, IntEnum
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import MappingProxyType
from typing import NamedTuple

import pytest
from hypothesis import given, settings, strategies as st

from offstage.pipeline.cache.fingerprint import Change, changes, fingerprint, outline

REPOSITORY = Path(__file__).parents[3]


class Color(Enum):
    RED = 1
    BLUE = 2


class Marker(Enum):
    ONE = object()
    OTHER = object()


class Number(IntEnum):
    ONE = 1


class Permission(Flag):
    READ = 1
    WRITE = 2


@dataclass(frozen=True, slots=True)
class Point:
    x: object
    y: object = 0


@dataclass
class Pair:
    x: object
    y: object = 0


class Subclass(Point):
    pass


class Named(NamedTuple):
    x: int


class Text(str):
    __slots__ = ()


DIFFERENT: list[object] = [
    None,
    "None",
    True,
    False,
    0,
    1,
    -1,
    255,
    -256,
    256,
    10**6000,
    1.0,
    0.0,
    -0.0,
    math.nan,
    math.inf,
    -math.inf,
    "1",
    "",
    "True",
    b"",
    b"1",
    "a\0b",
    "\udcff",
    [],
    (),
    {},
    set(),
    [[]],
    [()],
    [None],
    [1],
    (1,),
    {1},
    {1: None},
    {"1": None},
    {True: None},
    {(1,): None},
    {None: 1},
    [1, 2],
    [2, 1],
    [[1], 2],
    [[1, 2]],
    [[1], [2]],
    ["ab"],
    ["a", "b"],
    ["", "ab"],
    {"a": "b"},
    {"b": "a"},
    [("a", "b")],
    {"a": {"b": 1}},
    {"a": {}, "b": 1},
    Path("a"),
    Path("a/b"),
    "a/b",
    Color.RED,
    Color.BLUE,
    Number.ONE,
    Permission.READ,
    Permission.READ | Permission.WRITE,
    Permission(0),
    Point(1),
    Point(1, 2),
    Point(2, 1),
    Pair(1),
    {"x": 1, "y": 0},
]


def test_every_two_of_these_values_have_different_fingerprints() -> None:
    for one, other in itertools.combinations(DIFFERENT, 2):
        assert fingerprint(one) != fingerprint(other), f"{one!r} and {other!r}"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({1: "x", "1": "y"}, {"1": "y", 1: "x"}),
        ({"a": 1}, MappingProxyType({"a": 1})),
        ({"a": 1}, OrderedDict(a=1)),
        ({"a", "b", "c"}, frozenset({"c", "b", "a"})),
        (math.nan, -math.nan),
        (PurePosixPath("a/b"), PureWindowsPath("a\\b")),
        (Point(1, [2]), Point(1, [2])),
    ],
)
def test_equal_values_have_one_fingerprint(one: object, other: object) -> None:
    assert fingerprint(one) == fingerprint(other)


def test_a_member_of_an_enum_counts_by_its_name_whatever_its_value_is() -> None:
    assert fingerprint(Marker.ONE) != fingerprint(Marker.OTHER)


def test_a_container_that_occurs_twice_is_no_cycle() -> None:
    shared = [1]
    assert fingerprint([shared, shared]) == fingerprint([[1], [1]])


def test_it_is_64_hex_characters_that_never_change() -> None:
    value = {"stage": "plan", "budget": {0: 10**10, "cpu": None}, "seed": 1.5, "layers": [(1, b"2"), True]}
    assert fingerprint(value) == "ec4b45d83104f9b3812c128a070ea0c464e73668df109dc93a45b22d3ef098cb"


def test_another_process_with_another_hash_seed_agrees() -> None:
    value = {"names": {"a", "b", "c", "d"}, "x": 1, "y": {1: "z", "z": 1}}
    program = f"from offstage.pipeline.cache.fingerprint import fingerprint; print(fingerprint({value!r}))"
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", program],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout.strip() == fingerprint(value)


def cyclic_list() -> object:
    value: list[object] = [1]
    value.append({"self": value})
    return value


def cyclic_dataclass() -> object:
    value = Pair(1)
    value.x = [value]
    return value


def nested(depth: int) -> object:
    value: object = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: object(), ["value is a builtins.object", "no fingerprint", "plain data"]),
        (lambda: {"model": [1, 2, object()]}, ["value['model'][2] is a builtins.object"]),
        (lambda: [len], ["value[0] is a builtins.builtin_function_or_method"]),
        (lambda: {"f": lambda: 1}, ["value['f'] is a builtins.function"]),
        (lambda: {"dtype": Color}, ["value['dtype'] is a enum.EnumType"]),
        (lambda: Point(1, y={"z": 1j}), ["value.y['z'] is a builtins.complex"]),
        (lambda: Point, ["value is a builtins.type"]),
        (lambda: {("a", 1j): 1}, ["value.key(('a', 1j))[1] is a builtins.complex"]),
        (lambda: {1j}, ["value{1j} is a builtins.complex"]),
        (lambda: [bytearray(b"x")], ["value[0] is a builtins.bytearray"]),
        (lambda: (x for x in ()), ["value is a builtins.generator"]),
        (lambda: {"s": Text("x")}, ["value['s'] is a", "Text"]),
        (lambda: [Named(1)], ["value[0] is a", "Named"]),
        (lambda: Subclass(1), ["value is a", "Subclass"]),
        (cyclic_list, ["value[1]['self'] contains itself"]),
        (cyclic_dataclass, ["value.x[0] contains itself"]),
        (lambda: nested(200), ["nested more than 100 deep"]),
    ],
)
def test_what_has_no_fingerprint_is_refused_by_its_place(make: Callable[[], object], words: list[str]) -> None:
    with pytest.raises(TypeError) as raised:
        fingerprint(make())
    for word in words:
        assert word in str(raised.value)


def test_a_number_of_numpy_and_a_tensor_are_refused() -> None:
    numpy = pytest.importorskip("numpy")
    for value in (numpy.float64(1.0), numpy.int64(1), numpy.zeros(2)):
        with pytest.raises(TypeError, match=r"value\['x'\] is a numpy"):
            fingerprint({"x": value})


def test_the_class_of_a_dataclass_counts_and_the_order_of_its_fields_does_not() -> None:
    def made(fields: list[str], name: str) -> object:
        return make_dataclass(name, fields)(**dict.fromkeys(fields, 1))

    assert fingerprint(made(["a", "b"], "Same")) == fingerprint(made(["b", "a"], "Same"))
    assert fingerprint(made(["a", "b"], "Same")) != fingerprint(made(["a", "b"], "Other"))


LEAVES = st.sampled_from([None, True, False, 0, 1, -1, 0.0, -0.0, 1.0, "", "0", "1", b"", b"1", Color.RED])
VALUES = st.recursive(
    LEAVES,
    lambda children: (
        st.lists(children, max_size=3)
        | st.lists(children, max_size=3).map(tuple)
        | st.dictionaries(LEAVES, children, max_size=3)
        | st.frozensets(LEAVES, max_size=3)
        | st.builds(Point, children)
    ),
    max_leaves=5,
)


def typed(value: object) -> object:
    """What a fingerprint must tell apart, as a value that ``==`` tells apart."""
    if isinstance(value, float):
        return "float", value.hex()
    if isinstance(value, (list, tuple)):
        return type(value), tuple(typed(item) for item in value)
    if isinstance(value, dict):
        return dict, frozenset((typed(key), typed(item)) for key, item in value.items())
    if isinstance(value, frozenset):
        return frozenset, frozenset(typed(item) for item in value)
    if isinstance(value, Point):
        return Point, typed(value.x), typed(value.y)
    return type(value), value


@settings(deadline=None)
@given(VALUES, VALUES)
def test_fingerprints_are_equal_exactly_where_the_typed_values_are(one: object, other: object) -> None:
    assert (fingerprint(one) == fingerprint(other)) == (typed(one) == typed(other))


@settings(deadline=None)
@given(VALUES)
def test_a_copy_has_the_same_fingerprint(value: object) -> None:
    assert fingerprint(copy.deepcopy(value)) == fingerprint(value)


@settings(deadline=None)
@given(st.dictionaries(st.text(), st.integers(), min_size=2), st.randoms())
def test_the_order_of_insertion_is_no_part_of_it(value: dict[str, int], random: object) -> None:
    entries = list(value.items())
    random.shuffle(entries)  # type: ignore[attr-defined]
    assert fingerprint(dict(entries)) == fingerprint(value)


@settings(deadline=None)
@given(st.integers(), st.integers())
def test_integers_of_any_size_are_told_apart(one: int, other: int) -> None:
    assert (fingerprint(one) == fingerprint(other)) == (one == other)


def test_a_field_that_is_not_compared_is_no_part_of_it() -> None:
    kind = make_dataclass("Kind", [("x", int), ("beside", object, field(compare=False))])
    assert fingerprint([kind(1, object())]) == fingerprint([kind(1, 2)])
    assert fingerprint([kind(1, 2)]) != fingerprint([kind(2, 2)])


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
