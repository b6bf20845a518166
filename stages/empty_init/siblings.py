"""Tensors of a checkpoint that one tensor of the model is made of, as the experts of a layer are: which one is wrong.

A converter says of them at most that they don't go together. Their names are alike but for a number, which tells the
one that is missing; and all that match one pattern have one shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offstage.stages.checkpoints.packed import AtRest


@dataclass(frozen=True, slots=True)
class _Numbered:
    """Names that differ in one number: what stands before it and after it, and the numbers that there are."""

    before: str
    after: str
    numbers: frozenset[int]

    def name(self, number: int) -> str:
        """Return the name with ``number``."""
        return ".".join(part for part in (self.before, str(number), self.after) if part)


def missing_sibling(sources: Sequence[tuple[str, str]]) -> str | None:
    """Return the first name that is missing among ``sources`` (pattern and name); null where none is seen to be.

    Numbers go from the least to the largest that any of them has: the last of all can be missing unseen.
    """
    groups = [group for group in map(_numbered, _by_pattern(sources).values()) if group]
    numbers = [number for group in groups for number in group.numbers]
    for number in range(min(numbers, default=0), max(numbers, default=-1) + 1):
        for group in groups:
            if number not in group.numbers:
                return group.name(number)
    return None


def _by_pattern(sources: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for pattern, name in sources:
        groups.setdefault(pattern, []).append(name)
    return groups


def _numbered(names: Sequence[str]) -> _Numbered | None:
    """Return what ``names`` have in common, if they differ in one number alone."""
    if len({name.count(".") for name in names}) > 1:
        return None
    columns = list(zip(*(name.split(".") for name in names), strict=True))
    varying = [place for place, column in enumerate(columns) if len(set(column)) > 1]
    if len(varying) != 1 or not all(map(str.isdecimal, columns[varying[0]])):
        return None
    before, after = names[0].split(".")[: varying[0]], names[0].split(".")[varying[0] + 1 :]
    return _Numbered(".".join(before), ".".join(after), frozenset(map(int, columns[varying[0]])))


def unlike_sibling(sources: Sequence[tuple[str, str]], entries: Mapping[str, AtRest]) -> str | None:
    """Return what is wrong with the first of ``sources`` that hasn't the shape of most of its pattern; null if none."""
    for names in _by_pattern(sources).values():
        ((usual, _),) = Counter(entries[name].shape for name in names).most_common(1)
        for name in names:
            if (shape := entries[name].shape) != usual:
                return f"{name!r} is {list(shape)} where others like it are {list(usual)}"
    return None
