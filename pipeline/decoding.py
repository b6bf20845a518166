"""What was written as JSON, read back by the type hints of the class that it was made from.

A field without a value there has its default; one that the class doesn't have is none of it. Nothing is converted but
what JSON has no words for: tuples, and keys that are whole numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from offstage.pipeline.typed_config import fits

Kind = TypeVar("Kind")
Decoder = Callable[[Any], Any]


def decode(kind: type[Kind], data: object) -> Kind:
    """Return what ``data``, as JSON gives it, says: one of ``kind``, a dataclass or a tuple with named fields.

    Raises ``ValueError``, which names the fields down to the first one whose value isn't of its type.
    """
    hint: Any = kind
    made: Kind = _decoder(hint)(data)
    return made


@cache
def _decoder(hint: Any) -> Decoder:
    """Return what makes of a value one of the type ``hint``. (They are many: it is looked at once.)"""
    kind, arms = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType) and type(None) in arms and len(arms) == 2:
        inner = _decoder(next(arm for arm in arms if arm is not type(None)))
        return lambda value: None if value is None else inner(value)
    if is_dataclass(kind) or hasattr(kind, "_field_defaults"):
        return _of_fields(kind)
    if kind is tuple:
        return _of_items(_decoder(arms[0]), None if arms[-1] is Ellipsis else [_decoder(arm) for arm in arms])
    if isinstance(kind, type) and issubclass(kind, Mapping):
        named, inner = _decoder(arms[0]), _decoder(arms[1])
        numbered = int in get_args(arms[0])
        return _of_members(lambda key: int(key) if numbered and key.isdecimal() else named(key), inner)
    if kind is Any or kind in (Union, UnionType, Literal) or kind in (bool, int, float, str):
        return _checked(hint)
    raise TypeError(f"{hint!r} has no form in JSON")


def _of_fields(kind: Any) -> Decoder:
    hints = get_type_hints(kind)
    if is_dataclass(kind):
        hints = {entry.name: hints[entry.name] for entry in fields(kind)}
        needed = {one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING}
    else:
        needed = hints.keys() - kind._field_defaults.keys()
    decoders = {name: _decoder(hint) for name, hint in hints.items()}

    def made(value: Any) -> Any:
        if not isinstance(value, Mapping) or not value.keys() <= decoders.keys() or not needed <= value.keys():
            raise ValueError(f": {_shown(value)} isn't {kind.__name__}: an object of {', '.join(decoders)}")
        return kind(**{name: _within(name, decoders[name], one) for name, one in value.items()})

    return made


def _of_items(each: Decoder, items: list[Decoder] | None) -> Decoder:
    def made(value: Any) -> Any:
        if not isinstance(value, list | tuple) or (items is not None and len(value) != len(items)):
            raise ValueError(f": {_shown(value)} isn't a list{'' if items is None else f' of {len(items)}'}")
        read = [each] * len(value) if items is None else items
        return tuple(_within(place, read[place], one) for place, one in enumerate(value))

    return made


def _of_members(key: Decoder, inner: Decoder) -> Decoder:
    def made(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise ValueError(f": {_shown(value)} isn't an object")
        return {key(name): _within(name, inner, one) for name, one in value.items()}

    return made


def _checked(hint: Any) -> Decoder:
    def same(value: Any) -> Any:
        if not fits(hint, value):
            raise ValueError(f": {_shown(value)} isn't {getattr(hint, '__name__', hint)}")
        return value

    return same


def _within(place: object, read: Decoder, value: Any) -> Any:
    try:
        return read(value)
    except ValueError as error:
        raise ValueError(f".{place}{error}") from None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
