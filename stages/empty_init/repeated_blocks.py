"""Repeated blocks that compute alike, so that a rehearsal runs a few of them and notes of the others what these did.

Members of one list are alike where all that their code can tell them apart by is the same: class, the shapes and dtypes
of tensors, attributes, parts. One attribute may differ: a number that counts the members, as an index of its layer does
in a cache. Three of those that are alike are run: the first, which may find things undone; the second, which all
between do as; and the last, which shows whether they do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

_RUN = 3
"""How many of those alike are run: the first two and the last."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type)


@dataclass(frozen=True, slots=True)
class AlikeBlocks:
    """Names of members of one list that compute alike, in their order; more than are run."""

    names: tuple[str, ...]

    @property
    def model(self) -> str:
        """The one that those that aren't run do as."""
        return self.names[1]

    @property
    def proof(self) -> str:
        """The one that shows whether they do."""
        return self.names[-1]

    @property
    def skipped(self) -> tuple[str, ...]:
        """Those that aren't run."""
        return self.names[2:-1]


def find_alike(model: nn.Module) -> list[AlikeBlocks]:
    """Return the repeated blocks of ``model`` of which some needn't be run: those of its outermost lists.

    A block with a tensor or a module that has a second name in the model is like no other.
    """
    shared, alike = _shared(model), []
    for name, blocks in _outermost_lists(model):
        kinds = kinds_of({key: block for key, block in enumerate(blocks) if not shared & _identities(block)})
        alike += [AlikeBlocks(tuple(f"{name}.{key}" for key in kind)) for kind in kinds if len(kind) > _RUN]
    return alike


def kinds_of(blocks: Mapping[int, nn.Module]) -> list[list[int]]:
    """Return the places of ``blocks`` in their list, of those that compute alike together."""
    kinds: list[list[int]] = []
    for place, block in blocks.items():
        kind_of = next((kind for kind in kinds if _alike(blocks[kind[0]], block, place - kind[0])), None)
        if kind_of is None:
            kinds.append([place])
        else:
            kind_of.append(place)
    return kinds


def _outermost_lists(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    inside = ""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not (inside and name.startswith(inside)):
            inside = f"{name}."
            yield name, module


def _shared(model: nn.Module) -> set[int]:
    """Return the identities of tensors and modules that ``model`` has under several names."""
    seen, twice = set[int](), set[int]()
    pairs = (
        model.named_modules(remove_duplicate=False),
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    )
    for _, value in (pair for named in pairs for pair in named):
        (twice if id(value) in seen else seen).add(id(value))
    return twice


def _identities(block: nn.Module) -> set[int]:
    return {id(value) for value in (*block.modules(), *block.parameters(), *block.buffers())}


def _alike(one: nn.Module, other: nn.Module, apart: int) -> bool:
    """Return whether the code of ``one`` and ``other``, ``apart`` places from it, can't tell one from the other."""
    if type(one) is not type(other):
        return False
    mine, others = dict(vars(one)), dict(vars(other))
    parts, other_parts = mine.pop("_modules"), others.pop("_modules")
    return (
        list(parts) == list(other_parts)
        and are_alike(mine, others, apart)
        and all(parts[key] is other_parts[key] or _alike(parts[key], other_parts[key], apart) for key in parts)
    )


def _look(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def are_alike(mine: Any, others: Any, apart: int) -> bool:
    """Return whether code that meets the one value or the other, of blocks so many places ``apart``, does the same.

    An integer may count the places between them. Tensors are alike that look so: a rehearsal knows no values. What is
    no plain value is like itself alone.
    """
    if mine is others:
        return True
    if isinstance(mine, torch.Tensor) and isinstance(others, torch.Tensor):
        return _look(mine) == _look(others)
    if type(mine) is not type(others):
        return False
    if type(mine) is int:
        return bool(mine == others or others - mine == apart)
    if isinstance(mine, _PLAIN):
        return bool(mine == others)
    if isinstance(mine, Mapping):
        return list(mine) == list(others) and all(are_alike(mine[key], others[key], apart) for key in mine)
    if isinstance(mine, (list, tuple)):
        return len(mine) == len(others) and all(are_alike(*pair, apart) for pair in zip(mine, others, strict=True))
    if isinstance(mine, (set, frozenset)):
        return bool(mine == others) and all(isinstance(value, _PLAIN) for value in mine)
    if isinstance(mine, partial):
        ours, theirs = ((each.func, each.args, each.keywords) for each in (mine, others))
        return are_alike(ours, theirs, apart)
    return False
