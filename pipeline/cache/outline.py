"""What a key stands for, in a form that a record can hold and that says which part of two keys differs.

A key is one hash: two keys that differ say nothing about why. The outline of the same value keeps its structure;
what is short stands for itself, what is long is replaced by its hash.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import PurePath

from offstage.pipeline.cache.fingerprint import fingerprint

_LONGEST_TEXT = 200
_LONGEST_LIST = 2000


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """One part of two outlines that differs: its place (``checkpoint.files[1]``), and what it was and is."""

    place: str
    then: object
    now: object


def outline(value: object) -> object:
    """Return ``value``, which ``fingerprint`` takes, as JSON can hold it."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str | PurePath):
        return str(value) if len(str(value)) <= _LONGEST_TEXT else _hash(value)
    if isinstance(value, Enum):
        return str(value.name)
    if isinstance(value, Mapping):
        return {str(key): outline(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {entry.name: outline(getattr(value, entry.name)) for entry in dataclasses.fields(value)}
    if isinstance(value, list | tuple) and len(value) <= _LONGEST_LIST:
        return [outline(item) for item in value]
    return _hash(value)


def _hash(value: object) -> str:
    return f"sha256:{fingerprint(value)}"


def changes(then: object, now: object, place: str = "") -> Iterator[Change]:
    """Yield each part that differs between two outlines, the deepest that can be named."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys((*then, *now)):
            yield from changes(then.get(key), now.get(key), f"{place}.{key}" if place else str(key))
    elif _are_lists(then, now):
        for index, (old, new) in enumerate(zip(then, now, strict=True)):  # type: ignore[call-overload]
            yield from changes(old, new, f"{place}[{index}]")
    elif then != now:
        yield Change(place, then, now)


def _are_lists(then: object, now: object) -> bool:
    """Whether both are lists of one length with parts of their own: lists of scalars are told as a whole."""
    lists = isinstance(then, Sequence) and isinstance(now, Sequence) and not isinstance(then, str)
    return lists and len(then) == len(now) and all(isinstance(item, Mapping | list) for item in then)  # type: ignore
