"""Typed configs: one place for a key's type and default."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from offstage.pipeline.config import config_classes
from offstage.pipeline.typed_config import LEAST, OPEN, defaults, fits, key_names, read, read_open, type_faults


@dataclass(frozen=True, slots=True)
class Inner:
    depth: int = 3
    style: Literal["plain", "loud"] = "plain"


@dataclass(frozen=True, slots=True)
class Outer:
    inner: Inner = Inner()
    rate: float | None = None
    words: list[str] = field(default_factory=list)
    options: Mapping[str, Any] = field(default_factory=dict)


def test_what_is_not_given_has_its_default() -> None:
    assert read(Outer, {}) == Outer()
    assert read(Outer, {"inner": {"depth": 5}, "rate": 2, "stranger": 1}) == Outer(Inner(5), rate=2)
    assert defaults(Outer) == {"inner": {"depth": 3, "style": "plain"}, "rate": None, "words": [], "options": {}}


@pytest.mark.parametrize(
    ("hint", "right", "wrong"),
    [
        (bool, [True, False], [0, 1, "true", None]),
        (int, [0, -3], [True, 1.0, "1", None]),
        (float, [1, 1.5], [True, "1.5", None]),
        (str | None, ["", "x", None], [3, False]),
        (Literal["a", 1], ["a", 1], ["b", True, 1.0]),
        (list[int], [[], [1, 2]], [[1, "2"], 3, None, "12"]),
        (Mapping[str, Any], [{}, {"a": 1}], [[], None, "a"]),
        (Inner, [{}, {"depth": 1}], [3, None]),
        (Any, [None, 3, "x"], []),
    ],
)
def test_a_value_fits_its_type_exactly(hint: Any, right: list[object], wrong: list[object]) -> None:
    assert all(fits(hint, value) for value in right)
    assert not any(fits(hint, value) for value in wrong)


def test_all_faults_are_found_with_their_rules_and_defaults() -> None:
    given = {"inner": {"depht": 1, "style": "load"}, "rate": "fast", "words": ["a", 1], "options": 3}
    assert [str(fault) for fault in type_faults(Outer, given)] == [
        "inner.depht: unknown key (did you mean 'depth'?); offstage --cfg job shows every key",
        "inner.style: 'load' is none of plain, loud (did you mean 'loud'?); the default is 'plain'",
        "rate: 'fast' is no number or null; the default is None",
        "words: ['a', 1] is no list of texts; the default is []",
        "options: 3 is no mapping of keys to values; the default is {}",
    ]


@dataclass(frozen=True, slots=True)
class Counted:
    size: int | Literal["auto"] | None = field(default=None, metadata={LEAST: 1})
    steps: int = field(default=3, metadata={LEAST: 2})
    ratio: float | Literal["auto"] = 0.0
    loud: bool | None = None
    rest: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Opened:
    node: Mapping[str, Any] = field(default_factory=dict, metadata={OPEN: Counted})


def test_of_a_mapping_that_is_open_the_keys_that_are_known_are_held_against_their_types() -> None:
    assert not list(type_faults(Opened, {"node": {"size": "auto", "steps": 2, "ratio": None, "stranger": 0}}))
    given = {"size": 0, "steps": 1, "ratio": "atuo", "loud": 1, "stranger": 0}
    assert [str(fault) for fault in type_faults(Opened, {"node": given})] == [
        "node.size: 0 is neither a whole number from 1, auto nor null; the default is None",
        "node.steps: 1 is no whole number from 2; the default is 3",
        "node.ratio: 'atuo' is neither a number nor auto (did you mean 'auto'?); the default is 0.0",
        "node.loud: 1 is neither true, false nor null; the default is None",
    ]


def test_what_is_unknown_of_an_open_mapping_is_kept_apart_and_null_is_the_default() -> None:
    given = {"size": 4, "steps": None, "stranger": [1], "nobody": None, "rest": 5}
    assert read_open(Counted, given, others="rest") == Counted(size=4, rest={"stranger": [1], "rest": 5})


def test_the_shipped_file_says_what_each_key_means_and_repeats_no_default() -> None:
    from importlib import resources

    from omegaconf import OmegaConf

    text = (resources.files("offstage.conf") / "config.yaml").read_text()
    described = [line[2:].partition(":")[0].partition(".")[0] for line in text.splitlines() if line.startswith("# ")]
    assert set(key_names(config_classes())) <= set(described)
    assert set(OmegaConf.create(text)) == {"defaults", "hydra"}
