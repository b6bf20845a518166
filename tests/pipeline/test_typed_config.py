"""Typed configs: one place for a key's type and default."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from offstage.pipeline.config import config_classes
from offstage.pipeline.typed_config import defaults, fits, key_names, read, type_faults


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


def test_the_shipped_file_says_what_each_key_means_and_repeats_no_default() -> None:
    from importlib import resources

    from omegaconf import OmegaConf

    text = (resources.files("offstage.conf") / "config.yaml").read_text()
    described = [line[2:].partition(":")[0].partition(".")[0] for line in text.splitlines() if line.startswith("# ")]
    assert set(key_names(config_classes())) <= set(described)
    assert set(OmegaConf.create(text)) == {"defaults", "hydra"}
