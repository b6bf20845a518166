"""What was written as JSON comes back as what it was, and anything else is refused where it first differs."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
from hypothesis import given, strategies as st

from offstage.pipeline.decoding import BESIDE, KEY, SPARSE, WHOLE, decode, encode
from offstage.pipeline.errors import StorageError
from offstage.pipeline.stage import Artifact
from offstage.stages.empty_init.skeleton import Skeleton
from offstage.stages.plan.plan import Plan


class Point(NamedTuple):
    x: int
    way: Literal["up", "down"] | None = None


@dataclass(frozen=True)
class Inner:
    count: int
    share: float | None = None


@dataclass(frozen=True)
class Whole:
    name: str
    ratio: float
    points: tuple[Point, ...] = ()
    pair: tuple[int, str] = (0, "")
    by_device: Mapping[int | str, int | None] = field(default_factory=dict)
    inner: Inner | None = None


wholes = st.builds(
    Whole,
    name=st.text(),
    ratio=st.floats(allow_nan=False),
    points=st.lists(st.builds(Point, st.integers(), st.sampled_from(["up", "down", None]))).map(tuple),
    pair=st.tuples(st.integers(), st.text()),
    by_device=st.dictionaries(st.integers(0, 15) | st.sampled_from(["cpu", "disk"]), st.none() | st.integers()),
    inner=st.none() | st.builds(Inner, st.integers(), st.none() | st.floats(allow_nan=False)),
)


@given(made=wholes)
def test_what_was_written_comes_back(made: Whole) -> None:
    data = {**asdict(made), "points": [point._asdict() for point in made.points]}
    assert decode(Whole, json.loads(json.dumps(data))) == made


RIGHT = {"name": "a", "ratio": 1, "points": [{"x": 1}], "by_device": {"0": 1}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": 5}, ".name: 5 isn't str"),
        ({"ratio": "much"}, ".ratio: 'much' isn't float"),
        ({"ratio": True}, ".ratio: True isn't float"),
        ({"points": {}}, ".points: {} isn't a list"),
        ({"points": [{"x": 1}, {"way": "up"}]}, ".points.1: {'way': 'up'} isn't Point: an object of x, way"),
        ({"points": [{"x": 1, "way": "out"}]}, ".points.0.way: 'out' isn't"),
        ({"pair": [1]}, ".pair: [1] isn't a list of 2"),
        ({"pair": [1, 2]}, ".pair.1: 2 isn't str"),
        ({"by_device": {"cpu": "8"}}, ".by_device.cpu: '8' isn't int"),
        ({"by_device": []}, ".by_device: [] isn't an object"),
        ({"inner": {}}, ".inner: {} isn't Inner"),
        ({"more": 1}, "isn't Whole"),
    ],
)
def test_the_first_value_that_is_not_of_its_type_is_named(changes: dict[str, Any], words: str) -> None:
    assert decode(Whole, RIGHT) == Whole("a", 1, (Point(1),), by_device={0: 1})
    with pytest.raises(ValueError, match="isn't") as refused:
        decode(Whole, {**RIGHT, **changes})
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("data", [None, 0, "", [], [RIGHT]])
def test_another_thing_than_an_object_is_none(data: Any) -> None:
    with pytest.raises(ValueError, match="isn't"):
        decode(Whole, data)


DAMAGED = ["{}", "[]", '{"policy": "optimal"}', "{", '{"devices": {"cpu": 3}}', '"' + "a" * 500 + '"']


@pytest.mark.parametrize("content", DAMAGED)
@pytest.mark.parametrize("kind", [Plan, Skeleton])
def test_a_damaged_artifact_is_refused_in_one_line_with_its_file(kind: type, content: str, tmp_path: Path) -> None:
    tmp_path.joinpath("plan.json").write_text(content)
    with pytest.raises(StorageError) as refused:
        Artifact("plan", "key", tmp_path, {}).read(kind, "plan.json")
    message = str(refused.value)
    assert message.startswith(f"{tmp_path}/plan.json")
    assert f"remove {tmp_path}, and it is made again" in message
    assert "\n" not in message
    assert len(message) < 600


@dataclass(frozen=True)
class Section:
    kind: str = field(metadata={KEY: "class"})
    bound: float | None
    ids: tuple[int, ...] = ()
    pairs: tuple[tuple[float, int], ...] = ()
    figures: Mapping[str, int | float | str | None] = field(default_factory=dict)
    inner: Inner | None = None
    extra: int = field(default=3, metadata={SPARSE: True})
    whole: Mapping[str, Any] = field(default_factory=dict, metadata={KEY: WHOLE})
    place: str = field(default="here", metadata={KEY: BESIDE})


SECTION = {"class": "a", "bound": 0.5, "ids": [1, 2], "pairs": [[0.5, 1]], "figures": {"x": 1, "y": "b"}, "inner": None}


def test_a_part_that_is_open_passes_other_keys_over_and_keeps_the_whole() -> None:
    data = {**SECTION, "place": "elsewhere", "newer": [1]}
    section = decode(Section, data, "open")
    assert (section.kind, section.ids, section.pairs, section.place) == ("a", (1, 2), ((0.5, 1),), "here")
    assert section.whole == data
    assert encode(section) == SECTION, "the key that it has in JSON, and nothing of what isn't in it"
    assert encode(decode(Section, {**SECTION, "extra": 4}, "open")) == {**SECTION, "extra": 4}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"class": 3}, ".class: 3 isn't str"),
        ({"ids": [1, "2"]}, ".ids.1: '2' isn't int"),
        ({"ids": [1, True]}, ".ids.1: True isn't int"),
        ({"figures": {"x": [1]}}, ".figures.x: [1] isn't"),
        ({"inner": {}}, ".inner.count is missing"),
    ],
)
def test_a_part_that_is_open_is_strict_about_what_it_knows(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=r"isn't|is missing") as refused:
        decode(Section, {**SECTION, **changes}, "open")
    assert str(refused.value).startswith(words)


@pytest.mark.parametrize(
    ("changes", "name", "read"),
    [
        ({"class": 3}, "kind", ""),
        ({"class": None}, "kind", ""),
        ({"bound": "wide"}, "bound", None),
        ({"bound": math.inf}, "bound", None),
        ({"bound": 10**30}, "bound", None),
        ({"extra": "4"}, "extra", 3),
        ({"ids": None}, "ids", ()),
        ({"ids": [1, "2", None, 10**30, 3]}, "ids", (1, 3)),
        ({"ids": [1, -(10**30)]}, "ids", (1,)),
        ({"pairs": [[0.5, 1], [math.nan, 1], ["a", 2], [1.5, 3]]}, "pairs", ((0.5, 1), (1.5, 3))),
        ({"figures": {"x": [1], "y": math.nan, "z": "b"}}, "figures", {"x": None, "y": None, "z": "b"}),
    ],
)
def test_whoever_reads_leniently_takes_a_wrong_value_for_none(changes: dict[str, Any], name: str, read: object) -> None:
    assert getattr(decode(Section, {**SECTION, **changes}, "lenient"), name) == read


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ids": {}}, ".ids: {} isn't a list"),
        ({"pairs": [[1]]}, ".pairs.0: [1] isn't a list of 2"),
        ({"figures": [1]}, ".figures: [1] isn't an object"),
        ({"inner": 3}, ".inner: 3 isn't Inner"),
        ({"inner": {"count": "much"}}, ".inner.count is missing"),
    ],
)
def test_a_section_that_is_none_is_refused_by_whoever_reads_leniently_too(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=r"isn't|is missing") as refused:
        decode(Section, {**SECTION, **changes}, "lenient")
    assert str(refused.value).startswith(words)
