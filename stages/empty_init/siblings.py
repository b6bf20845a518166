"""Tensors of a checkpoint that one tensor of the model is made of, as the experts of a layer are: which one is wrong.

A converter says of them at most that they don't go together. Their names are alike but for a number, which tells the
one that is missing; and all that match one pattern have one shape.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile

from offstage.stages.checkpoints.packed import AtRest


def missing_sibling(sources: Sequence[tuple[str, str]]) -> str | None:
    """Return the first name that is missing among ``sources`` (pattern and name); null where none is seen to be.

    Numbers go from the least to the largest that any of them has: the last of all can be missing unseen.
    """
    groups = [numbered for names in _by_pattern(sources) if (numbered := _by_number(names))]
    numbers = {number for group in groups for number in group}
    for number in range(min(numbers, default=0), max(numbers, default=-1) + 1):
        for group in groups:
            if number not in group:
                (before, after), *_ = group.values()
                return ".".join([*before, str(number), *after])
    return None


def _by_pattern(sources: Sequence[tuple[str, str]]) -> Iterable[list[str]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for pattern, name in sources:
        groups[pattern].append(name)
    return groups.values()


def _by_number(names: Sequence[str]) -> dict[int, tuple[list[str], list[str]]]:
    """Return what stands before and after the number of each of ``names``; nothing unless they differ in that alone."""
    parts = [name.split(".") for name in names]
    before, after = _shared_by(parts), _shared_by([part[::-1] for part in parts])[::-1]
    middles = [part[len(before) : len(part) - len(after)] for part in parts]
    if not all(len(middle) == 1 and middle[0].isdecimal() for middle in middles):
        return {}
    return {int(number): (before, after) for (number,) in middles}


def _shared_by(parts: Sequence[list[str]]) -> list[str]:
    """Return what all of ``parts`` begin with."""
    return [column[0] for column in takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False))]


def unlike_sibling(sources: Sequence[tuple[str, str]], entries: Mapping[str, AtRest]) -> str | None:
    """Return what is wrong with the first of ``sources`` that hasn't the shape of most of its pattern; null if none."""
    for names in _by_pattern(sources):
        ((usual, _),) = Counter(entries[name].shape for name in names).most_common(1)
        for name in names:
            if (shape := entries[name].shape) != usual:
                return f"{name!r} is {list(shape)} where others like it are {list(usual)}"
    return None
