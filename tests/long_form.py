"""Which cases of a test CI has: those that differ most. The others run in the long form alone, by hand."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from operator import getitem
from typing import Any

import pytest

LONG_FORM = "OFFSTAGE_LONG"
"""The environment variable with which tests in the long form run too, and searches draw freely."""


def in_ci(*chosen: Any, of: Iterable[Any]) -> list[Any]:
    """Return the cases ``of`` a test to parametrise it with; those that aren't ``chosen`` are in the long form.

    A tuple has a value for each of several names.
    """
    cases = list(of)
    assert all(case in cases for case in chosen), "a case that there isn't"
    return [case if case in chosen else pytest.param(*_values(case), marks=pytest.mark.long_form) for case in cases]


def in_part(of: Iterable[Any], *, every: int = 2) -> list[Any]:
    """Return the cases ``of`` a test, many of which show one mechanism: CI has one of so many, from the first on."""
    return [
        case if place % every == 0 else pytest.param(*_values(case), marks=pytest.mark.long_form)
        for place, case in enumerate(of)
    ]


def in_turn(*axes: Iterable[Any]) -> list[Any]:
    """Return the product of ``axes``, of which CI has those that meet the members of the last one in turn.

    So each pair of members of two axes is met, where they are no fewer than the last one's.
    """
    listed = [list(axis) for axis in axes]
    places = product(*(range(len(axis)) for axis in listed))
    chosen = [place for place in places if sum(place) % len(listed[-1]) == 0]
    return in_ci(*(tuple(map(getitem, listed, place)) for place in chosen), of=product(*listed))


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
