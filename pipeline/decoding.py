"""What was written as JSON, read back by the type hints of the class that it was made from.

A field without a value there has its default. Nothing is converted but what JSON has no words for: tuples, and keys
that are whole numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache, partial
from itertools import repeat
from operator import gt
from reprlib import Repr
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from offstage.pipeline.typed_config import fits

KEY = "key"
"""What a field's metadata has under this name is its key in JSON, where that is another than its name."""
WHOLE = object()
"""The key of a field that gets the whole object as it stands there."""
BESIDE = object()
"""The key of a field that JSON doesn't have."""
SPARSE = "sparse"
"""A field whose metadata has this name isn't written where it has its default."""
CHOICES = "choices"
"""What a field's metadata has under this name are the words that are written; others may be read all the same."""

Kind = TypeVar("Kind")
Decoder = Callable[[Any], Any]
Reading = Literal["exact", "open", "lenient"]
"""``exact``: each key is one of a field. ``open``: others are passed over. ``lenient``: so are values that aren't of
their types, or are null; a field has its default then, else what is empty of its type, a key of a mapping null, and a
list goes without. What must be an object or a list is one all the same."""

_LARGEST = 2**63
"""Numbers from here on, and those that are none, are no values to who reads leniently: no array holds them."""
_UNKNOWN = object()
_BRIEF = Repr()
_BRIEF.maxstring = _BRIEF.maxother = 60  # of a value that may have millions of parts
_SCALARS: Mapping[object, tuple[type, ...]] = {
    bool: (bool,), int: (int,), float: (int, float), str: (str,), NoneType: (NoneType,),
}  # fmt: skip


def decode(kind: type[Kind], data: object, reading: Reading = "exact") -> Kind:
    """Return what ``data``, as JSON gives it, says: one of ``kind``, a dataclass or a tuple with named fields.

    Raises ``ValueError``, which names the fields down to the first one whose value isn't of its type.
    """
    hint: Any = kind
    decoded: Kind = _decoder(hint, reading)(data)
    return decoded


def encode(data: Any) -> Any:
    """Return what ``decode`` makes ``data`` of: an object for a dataclass, a list for a tuple."""
    if isinstance(data, tuple):
        return [encode(one) for one in data]
    if isinstance(data, Mapping):
        return {key: encode(value) for key, value in data.items()}
    if not is_dataclass(data):
        return data
    written = ((one, getattr(data, one.name)) for one in fields(data))
    return {
        json_key(one): encode(value)
        for one, value in written
        if isinstance(json_key(one), str) and not (SPARSE in one.metadata and value == default_of(one))
    }


def json_key(entry: Field[Any]) -> Any:
    """Return the key that a field has in JSON: a name, ``WHOLE`` or ``BESIDE``."""
    return entry.metadata.get(KEY, entry.name)


def default_of(entry: Field[Any]) -> Any:
    """Return what a field has where nothing is given, ``MISSING`` where something must be."""
    return entry.default if entry.default_factory is MISSING else entry.default_factory()


@cache
def _decoder(hint: Any, reading: Reading) -> Decoder:
    """Return what makes of a value one of the type ``hint``. (They are many: it is looked at once.)"""
    kind, arms, inner = get_origin(hint) or hint, get_args(hint), partial(_decoder, reading=reading)
    if kind in (Union, UnionType) and NoneType in arms and len(arms) == 2:
        one = inner(next(arm for arm in arms if arm is not NoneType))
        return lambda value: None if value is None else one(value)
    if is_dataclass(kind) or hasattr(kind, "_field_defaults"):
        return _of_fields(kind, reading)
    if kind is tuple:
        return _of_items(arms[0], reading) if arms[-1] is Ellipsis else _of_places([inner(arm) for arm in arms])
    if isinstance(kind, type) and issubclass(kind, Mapping):
        named, numbered = inner(arms[0]), int in get_args(arms[0])
        return _of_members(lambda key: int(key) if numbered and key.isdecimal() else named(key), inner(arms[1]))
    if kind is Any or kind in (Union, UnionType, Literal) or kind in (bool, int, float, str):
        return _checked(hint, is_lenient=reading == "lenient")
    raise TypeError(f"{hint!r} has no form in JSON")


def _of_fields(kind: Any, reading: Reading) -> Decoder:
    hints = get_type_hints(kind)
    if is_dataclass(kind):
        names = {json_key(one): one.name for one in fields(kind)}
        needed = {json_key(one) for one in fields(kind) if default_of(one) is MISSING}
    else:
        names, needed = {name: name for name in hints}, hints.keys() - kind._field_defaults.keys()
    decoders = {key: _decoder(hints[name], reading) for key, name in names.items() if isinstance(key, str)}
    is_lenient, whole = reading == "lenient", names.get(WHOLE)
    forgiven = needed if is_lenient else ()
    nothing = {key: one for key in forgiven if (one := _empty(hints[names[key]])) is not _UNKNOWN}

    def decoder(value: Any) -> Any:
        fit = isinstance(value, Mapping)
        if not fit or (reading == "exact" and not (value.keys() <= decoders.keys() and needed <= value.keys())):
            raise ValueError(f": {_shown(value)} isn't {kind.__name__}: an object of {', '.join(decoders)}")
        given = [key for key in decoders if key in value and not (is_lenient and value[key] is None)]
        read = ((key, _within(key, decoders[key], value[key])) for key in given)
        decoded = nothing | {key: one for key, one in read if one is not _UNKNOWN}
        if lacking := needed - decoded.keys():
            raise ValueError(f".{min(lacking)} is missing")
        members = {names[key]: one for key, one in decoded.items()}
        return kind(**members) if whole is None else kind(**members, **{whole: value})

    return decoder


def _empty(hint: Any) -> Any:
    """Return what there is of the type ``hint`` where nothing is known."""
    kind, arms = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType) and NoneType in arms:
        return None
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return {}
    return kind() if kind in (str, bool, tuple) else _UNKNOWN


def _of_places(items: list[Decoder]) -> Decoder:
    def decoder(value: Any) -> Any:
        if not isinstance(value, list | tuple) or len(value) != len(items):
            raise ValueError(f": {_shown(value)} isn't a list of {len(items)}")
        read = tuple(_within(place, items[place], one) for place, one in enumerate(value))
        return _UNKNOWN if any(one is _UNKNOWN for one in read) else read

    return decoder


def _of_items(hint: Any, reading: Reading) -> Decoder:
    read, is_lenient = _decoder(hint, reading), reading == "lenient"
    arms = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    scalars = {kind for arm in arms for kind in _SCALARS.get(arm, ())}

    def decoder(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise ValueError(f": {_shown(value)} isn't a list")
        if set(map(type, value)) <= scalars and not (is_lenient and _holds_unknown(value)):  # there may be millions
            return tuple(value)
        decoded = (_within(place, read, one) for place, one in enumerate(value))
        return tuple(one for one in decoded if one is not _UNKNOWN)

    return decoder


def _holds_unknown(values: list[Any] | tuple[Any, ...]) -> bool:
    """Return whether one of many scalars is a number that whoever reads leniently doesn't know."""
    numbers = () if str in set(map(type, values)) else filter(None, values)
    return not all(map(gt, repeat(_LARGEST), map(abs, numbers)))


def _of_members(key: Decoder, inner: Decoder) -> Decoder:
    def decoder(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise ValueError(f": {_shown(value)} isn't an object")
        read = {key(name): _within(name, inner, one) for name, one in value.items()}
        return {name: None if one is _UNKNOWN else one for name, one in read.items()}

    return decoder


def _checked(hint: Any, *, is_lenient: bool) -> Decoder:
    def same(value: Any) -> Any:
        if hint is Any:
            return value
        is_wild = is_lenient and isinstance(value, int | float) and not abs(value) < _LARGEST
        if fits(hint, value) and not is_wild:
            return value
        if is_lenient:
            return _UNKNOWN
        raise ValueError(f": {_shown(value)} isn't {getattr(hint, '__name__', hint)}")

    return same


def _within(place: object, read: Decoder, value: Any) -> Any:
    try:
        return read(value)
    except ValueError as error:
        raise ValueError(f".{place}{error}") from None


def _shown(value: object) -> str:
    text = _BRIEF.repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
