"""A value's fingerprint: the same for the same value in every process, and another for any other value.

A key that two different values share serves a wrong artifact in silence, so nothing is hashed by its
``repr``, its pickle or its ``hash()``. Each value is encoded with its type and the lengths of its parts,
which makes the encoding reversible in principle: two values encode alike only if they are equal and of one
type. A type that has no such encoding is refused rather than guessed at.

Two keys that differ say nothing about why. The outline of the same value is what a record holds of it: it keeps the
structure, what is short stands for itself, what is long is replaced by its hash.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import PurePath
from typing import NoReturn, cast

_DEEPEST = 100
_LONGEST_TEXT = 200
_LONGEST_LIST = 2000


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Where inside the value the encoder is: the name for an error, the ids of the containers around it."""

    name: str
    around: tuple[int, ...] = ()

    def inside(self, container: object, step: str) -> _Place:
        return _Place(f"{self.name}{step}", (*self.around, id(container)))

    def refuse(self, why: str) -> NoReturn:
        raise TypeError(f"{self.name} {why}")


def fingerprint(value: object) -> str:
    """Return 64 hex characters (SHA-256) that stand for ``value``.

    Taken are None, bool, int, float, str, bytes, list, tuple, mappings and sets (in any order), members of an
    Enum, paths, and instances of dataclasses by the fields that they are compared by, nested as they like. A str is not
    a path, 1 is neither "1" nor True nor 1.0, and a list is no tuple; 0.0 and -0.0 differ, every nan is one.

    Raises:
        TypeError: a part of the value is of another type, contains itself, or is nested more than 100 deep.
            The message says which part: ``value['model'][2]``.
    """
    return hashlib.sha256(_encode(value, _Place("value"))).hexdigest()


def _encode(value: object, place: _Place) -> bytes:
    """Return the encoding of ``value``: a tag for its type, then its parts, each after its length."""
    scalar = _scalar(value)
    if scalar is not None:
        return scalar
    if id(value) in place.around:
        place.refuse("contains itself; a fingerprint needs a value with an end")
    if len(place.around) >= _DEEPEST:
        place.refuse(f"is nested more than {_DEEPEST} deep; a fingerprint needs a value with an end")
    return _container(value, place)


def _scalar(value: object) -> bytes | None:
    """Return the encoding of a value without parts, or None if it isn't one.

    Types are compared exactly: a subclass (``numpy.float64`` is a float) may mean more than its base says.
    """
    if value is None or type(value) is bool:
        return _pack(repr(value))
    if type(value) is int:
        return _pack("int", value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))
    if type(value) is float:
        return _pack("float", b"nan" if math.isnan(value) else struct.pack(">d", value))
    if type(value) is str:
        return _pack("str", _text(value))
    if type(value) is bytes:
        return _pack("bytes", value)
    if isinstance(value, PurePath):
        return _pack("path", _text(value.as_posix()))
    return None


def _container(value: object, place: _Place) -> bytes:
    kind = type(value)
    if isinstance(value, Enum):
        member = value.value if value.name is None else value.name
        return _pack("enum", _name_of(kind), _encode(member, place.inside(value, ".name")))
    if type(value) is list or type(value) is tuple:
        items = enumerate(cast(Iterable[object], value))
        return _pack(kind.__name__, *(_encode(item, place.inside(value, f"[{index}]")) for index, item in items))
    if type(value) is set or type(value) is frozenset:
        return _pack("set", *sorted(_encode(one, place.inside(value, f"{{{one!r}}}")) for one in value))
    if "__dataclass_fields__" in vars(kind):
        return _pack("dataclass", _name_of(kind), *_fields(value, place))
    if isinstance(value, Mapping):
        return _pack("mapping", *_entries(value, place))
    name = f"{kind.__module__}.{kind.__qualname__}"
    return place.refuse(
        f"is a {name}, which has no fingerprint; give plain data instead "
        "(None, bool, int, float, str, bytes, list, tuple, dict, set, Enum member, path, dataclass)"
    )


def _entries(value: Mapping[object, object], place: _Place) -> Iterable[bytes]:
    """Return the entries in an order that doesn't depend on how the mapping was filled."""
    return sorted(
        _pack(
            "entry",
            _encode(key, place.inside(value, f".key({key!r})")),
            _encode(item, place.inside(value, f"[{key!r}]")),
        )
        for key, item in value.items()
    )


def _fields(value: object, place: _Place) -> Iterable[bytes]:
    names = [field.name for field in dataclasses.fields(value) if field.compare]  # type: ignore[arg-type]
    return (
        _pack("field", _text(name), _encode(getattr(value, name), place.inside(value, f".{name}")))
        for name in sorted(names)
    )


def _pack(tag: str, *parts: bytes) -> bytes:
    lengths_and_parts = (piece for part in parts for piece in (struct.pack(">Q", len(part)), part))
    return b"".join([_text(tag), b"\0", struct.pack(">Q", len(parts)), *lengths_and_parts])


def _text(value: str) -> bytes:
    """Return UTF-8; a file name that isn't UTF-8 has lone surrogates in it, which pass."""
    return value.encode("utf-8", "surrogatepass")


def _name_of(kind: type) -> bytes:
    return _pack("class", _text(kind.__module__), _text(kind.__qualname__))


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
