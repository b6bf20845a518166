"""Merges that only move data: which place of a result each source of a step has, as it is.

transformers' operations hold all sources and the result. The common ones are known by their places, from headers alone:
so a result can be filled one source after the other, or read from where its sources lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offstage.stages.checkpoints.packed import AtRest
from offstage.stages.empty_init.names import NamingStep

Places = Callable[[torch.Tensor], Iterator[tuple[str, torch.Tensor]]]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a result: its shape, and which source goes to which view of it (of the memory it is given)."""

    shape: tuple[int, ...]
    places: Places


def sources_in_order(step: NamingStep, entries: Mapping[str, AtRest]) -> tuple[str, ...]:
    """Return the sources of ``step`` in the order in which the one tensor that it makes is these, one after the other.

    Empty if its operations aren't all known, or don't leave each source as it is, in one piece.
    """
    if step.converter is None:
        return tuple(step.source_names)
    piece = as_piece(step, entries)
    views = list(piece.places(torch.empty(piece.shape, device="meta"))) if piece else []
    if not all(view.is_contiguous() for _, view in views):
        return ()
    return tuple(name for name, _ in sorted(views, key=lambda place: place[1].storage_offset()))


def as_piece(step: NamingStep, entries: Mapping[str, AtRest]) -> Piece | None:
    """Return the one target of ``step`` as places for its sources, or null if its operations aren't all known."""
    if len(step.targets) != 1:
        return None
    patterns: Sequence[str] = getattr(step.converter, "source_patterns", ())
    state: dict[str, list[Piece]] = {pattern: [] for pattern in patterns}
    for pattern, name in step.sources:
        state[pattern].append(_leaf(name, entries[name].shape))
    (shape,) = step.targets.values()
    for operation in getattr(step.converter, "operations", [None]):
        state = _apply(operation, {pattern: pieces for pattern, pieces in state.items() if pieces}, shape)
    pieces = [piece for same_pattern in state.values() for piece in same_pattern]
    return pieces[0] if len(pieces) == 1 and pieces[0].shape == shape else None


def _apply(operation: Any, state: dict[str, list[Piece]], shape: tuple[int, ...]) -> dict[str, list[Piece]]:
    """Return what ``operation`` makes of the pieces by pattern, in the patterns' order; nothing if it isn't known.

    All of them together make a tensor of ``shape``.
    """
    from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose

    if type(operation) is MergeModulelist:
        return {pattern: [_stack(pieces, operation.dim)] for pattern, pieces in state.items()}
    if type(operation) is Concatenate:
        return {"": [_cat([piece for pieces in state.values() for piece in pieces], operation.dim)]}
    if type(operation) is Transpose and len(state) == 1:
        ((pattern, (piece, *_)),) = state.items()
        stays = operation.check_dims and piece.shape == shape
        return {pattern: [piece if stays else _transpose(piece, operation.dim0, operation.dim1)]}
    return {}


def _leaf(name: str, shape: tuple[int, ...]) -> Piece:
    return Piece(shape, lambda view: iter([(name, view)]))


def _stack(pieces: Sequence[Piece], dim: int) -> Piece:
    shape = list(pieces[0].shape)
    axis = dim % (len(shape) + 1)
    shape.insert(axis, len(pieces))

    def places(view: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        for index, piece in enumerate(pieces):
            yield from piece.places(view.select(axis, index))

    return Piece(tuple(shape), places)


def _cat(pieces: Sequence[Piece], dim: int) -> Piece:
    shape = list(pieces[0].shape)
    axis = dim % len(shape)
    shape[axis] = sum(piece.shape[axis] for piece in pieces)

    def places(view: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        start = 0
        for piece in pieces:
            yield from piece.places(view.narrow(axis, start, piece.shape[axis]))
            start += piece.shape[axis]

    return Piece(tuple(shape), places)


def _transpose(piece: Piece, dim0: int, dim1: int) -> Piece:
    order = list(range(len(piece.shape)))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    shape = tuple(piece.shape[axis] for axis in order)
    return Piece(shape, lambda view: piece.places(view.transpose(dim0, dim1)))
