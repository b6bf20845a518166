"""Plain data, what JSON and YAML hold, as a tree that is gone through node by node."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

LARGEST = 2**64
"""Numbers from here on, and those that are none, stand in no record."""
_SCALARS = {bool, int, float, str, type(None)}
_PLAIN = (Mapping, list, tuple, str, int, float, type(None))
DEEPEST = 50
"""More than any config is nested, and less than a record may be that has it in it."""


def walk(data: object, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``data``, which lies at ``place``, and all that is in it, in order: places like ``model.layers[0].size``.

    However deep it is nested: there is no recursion here.
    """
    waiting: list[tuple[str, object]] = [(place, data)]
    while waiting:
        place, node = waiting.pop()
        yield place, node
        inner: list[tuple[str, object]] = []
        if isinstance(node, Mapping):
            inner = [(f"{place}.{key}" if place else str(key), value) for key, value in node.items()]
        elif isinstance(node, list | tuple):
            inner = [(f"{place}[{index}]", value) for index, value in enumerate(node)]
        waiting += reversed(inner)


def leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what is no mapping of keys, lists as a whole and empty mappings too, by its dotted key."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def scalars(data: object) -> Iterator[Any]:
    """Yield what in ``data`` has nothing in itself, in no order; of many it takes a fraction of the time of a walk."""
    waiting = [data]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict | list | tuple):
            waiting += node.values() if isinstance(node, dict) else node
        else:
            yield node


def as_json(data: object, *, indent: int = 2) -> str:
    """Return ``data`` as JSON with an entry a line, but lists of scalars in one: they may be of millions of tokens."""
    return "".join(_pieces(data, "\n", " " * indent)) + "\n"


def _pieces(node: object, margin: str, step: str) -> Iterator[str]:
    inner: list[tuple[str, object]] = []
    if isinstance(node, dict):
        names = (key if isinstance(key, str) else json.dumps(key) for key in node)
        inner = [(f"{json.dumps(name)}: ", value) for name, value in zip(names, node.values(), strict=True)]
    elif isinstance(node, list | tuple) and not set(map(type, node)) <= _SCALARS:
        inner = [("", value) for value in node]
    begin, end = "{}" if isinstance(node, dict) else "[]"
    for place, (name, value) in enumerate(inner):
        yield f"{',' if place else begin}{margin}{step}{name}"
        yield from _pieces(value, margin + step, step)
    yield f"{margin}{end}" if inner else json.dumps(node)


def unrecordable(data: object) -> Iterator[tuple[str, str]]:
    """Yield the place of whatever in ``data`` a record in JSON can't hold, and why: bytes, objects, too deep a nest.

    However deep that is: there is no recursion here.
    """
    waiting: list[tuple[str, object, int]] = [("", data, 0)]
    while waiting:
        place, node, depth = waiting.pop()
        inner = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list | tuple) else ()
        why = _unrecordable(node)
        if why:
            yield place, why
        elif inner and depth > DEEPEST:
            yield place.partition(".")[0].partition("[")[0], f"nested more than {DEEPEST} deep; nest it less"
        else:
            below = "[{}]" if isinstance(node, list | tuple) else ".{}" if place else "{}"
            named = [(f"{place}{below.format(key)}", key, value) for key, value in inner]
            waiting += [(inner_place, value, depth + 1) for inner_place, _, value in named]
            waiting += [(inner_place, key, depth + 1) for inner_place, key, _ in named if isinstance(key, bytes)]


def _unrecordable(node: object) -> str | None:
    if isinstance(node, bytes):
        return f"{node[:20]!r} are bytes, which no record holds; give a text"
    if not isinstance(node, _PLAIN):
        rule = "stands in no record; give Python's own numbers, text, lists or mappings"
        return f"a value of type {type(node).__name__} {rule}"
    return None


_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Return ``text`` with control characters, text direction overrides and lone surrogates made visible.

    Carriage returns are left out: before the end of a line they mean nothing, elsewhere they would write over it. Each
    character is looked at by itself, so that text may be given piece by piece.
    """
    return _CONTROLS.sub("\ufffd", text.replace("\r", ""))


def printable_data(value: Any) -> Any:
    """Return plain data with all text in it ``printable``. Most of a record is numbers, and nothing else is as long."""
    if isinstance(value, str):
        return value if value.isascii() and value.isprintable() else printable(value)
    if isinstance(value, list):
        return value if set(map(type, value)) <= {int, float} else [printable_data(entry) for entry in value]
    if isinstance(value, dict):
        return {printable_data(key): printable_data(entry) for key, entry in value.items()}
    return value
