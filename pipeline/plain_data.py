"""Plain data, what JSON and YAML hold, as a tree that is gone through node by node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


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
