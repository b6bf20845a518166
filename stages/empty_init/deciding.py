"""What a forward decides by its data, decided without data: fake tensors whose integers are real.

A router picks experts by what it computed from weights, and code that loops over those picked asks for numbers that
fake tensors don't have. So what isn't computed from a weight is computed, and where a float becomes an integer or a
truth (the indices of a top-k, a comparison), all of its values are taken to be ones. That is one possible forward and
a whole one: all shapes fit, every token is routed alike, and to as many experts as it would be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
_INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)


def is_decided(args: Any) -> bool:
    """Return whether an operator with the arguments ``args`` can be computed: it has tensors, and all are real."""
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    return bool(tensors) and not any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors)


def is_of_integers(args: Any) -> bool:
    """Return whether all tensors that an operator is given are real integers or truths; so where it is given none."""
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    return all(_decides(tensor) and not isinstance(tensor, FakeTensor) and not tensor.is_meta for tensor in tensors)


def with_indices(func: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """Return ``args`` of ``func``; masks that it indexes with as indices, so that the result's shape is known."""
    if func not in _INDEXING:
        return tuple(args)
    indices: list[torch.Tensor | None] = []
    for index in args[1]:
        is_mask = isinstance(index, torch.Tensor) and index.dtype == torch.bool and is_decided(index)
        indices += index.nonzero().unbind(1) if is_mask else [index]
    return args[0], indices, *args[2:]


def decide(func: Any, args: Any, kwargs: Any, faked: Any) -> Any:
    """Return ``faked``, what ``func`` returned of fake tensors, with real tensors for its integers and truths."""
    if not any(map(_decides, tree_leaves(faked))):
        return faked
    reals = func(*tree_map(_ones, args), **tree_map(_ones, kwargs))
    return tree_map(lambda fake, real: real if _decides(fake) else fake, faked, reals)


def _decides(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())


def _ones(value: Any) -> Any:
    """Return ones in place of a fake tensor; they take no memory, whatever their shape."""
    if not isinstance(value, FakeTensor):
        return value
    return torch.ones((), dtype=value.dtype).expand(value.shape)
