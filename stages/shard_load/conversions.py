"""Making tensors of the model that are not simply somewhere in the checkpoint: merges, splits, transposes.

transformers' own operations hold all sources and the result at once. The common ones only move data, so here each
source is read and written straight to its place in the result: no more is held than the result and one source. A
chain with any other operation is left to transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stages.checkpoints.dtypes import torch_dtype
from stages.checkpoints.readers import SourceReader
from stages.empty_init.skeleton import parent
from stages.machine.aligned_memory import room_for
from stages.shard_load.names import Step, convert

Places = Callable[[torch.Tensor], Iterator[tuple[str, torch.Tensor]]]
Fill = Callable[[Iterable[tuple[str, torch.Tensor]]], None]
"""Fills each view with the tensor of the checkpoint that is named beside it, cast to the view's dtype."""


@dataclass(frozen=True, slots=True)
class _Target:
    """A part of a result: its shape, and which source goes to which view of it (of the memory it is given)."""

    shape: tuple[int, ...]
    places: Places


def build(
    model: nn.Module, step: Step, *, reader: SourceReader, dtypes: Mapping[str, str], fill: Fill
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield those targets of ``step`` that ``dtypes`` names, in these dtypes, contiguous, on the cpu.

    ``fill`` reads what goes to known places of a result; ``reader`` all else.
    """
    for name, dtype in dtypes.items() if step.converter is None else ():
        kind = torch_dtype(dtype)
        yield name, reader.read(step.source_names[0], kind) if step.sources else computed(model, name, kind)
    if step.converter is not None:
        yield from _merged(model, step, reader=reader, dtypes=dtypes, fill=fill)


def _merged(
    model: nn.Module, step: Step, *, reader: SourceReader, dtypes: Mapping[str, str], fill: Fill
) -> Iterator[tuple[str, torch.Tensor]]:
    piece = _as_piece(step, reader)
    made: dict[str, torch.Tensor] = {}
    if piece is None:
        made = _converted(model, step, reader=reader, dtype=torch_dtype(next(iter(dtypes.values()))))
    for name, dtype in dtypes.items():
        kind = torch_dtype(dtype)
        yield name, _gathered(piece, kind, fill) if piece else made.pop(name).to(kind).contiguous()


def _gathered(piece: _Target, dtype: torch.dtype, fill: Fill) -> torch.Tensor:
    result = room_for(piece.shape, dtype).tensor
    fill(piece.places(result))
    return result


def sources_in_order(step: Step, reader: SourceReader) -> tuple[str, ...]:
    """Return the sources of ``step`` in the order in which the one tensor that it makes is these, one after the other.

    Empty if its operations aren't all known, or don't leave each source as it is, in one piece.
    """
    if step.converter is None:
        return tuple(step.source_names)
    piece = _as_piece(step, reader)
    views = list(piece.places(torch.empty(piece.shape, device="meta"))) if piece else []
    if not all(view.is_contiguous() for _, view in views):
        return ()
    return tuple(name for name, _ in sorted(views, key=lambda place: place[1].storage_offset()))


def _as_piece(step: Step, reader: SourceReader) -> _Target | None:
    """Return the one target of ``step`` as places for its sources, or null if its operations aren't all known."""
    if len(step.targets) != 1:
        return None
    patterns: Sequence[str] = getattr(step.converter, "source_patterns", ())
    state: dict[str, list[_Target]] = {pattern: [] for pattern in patterns}
    for pattern, name in step.sources:
        state[pattern].append(_leaf(name, reader.entries[name].shape))
    (shape,) = step.targets.values()
    for operation in getattr(step.converter, "operations", [None]):
        state = _apply(operation, {pattern: pieces for pattern, pieces in state.items() if pieces}, shape)
    pieces = [piece for same_pattern in state.values() for piece in same_pattern]
    return pieces[0] if len(pieces) == 1 and pieces[0].shape == shape else None


def _apply(operation: Any, state: dict[str, list[_Target]], shape: tuple[int, ...]) -> dict[str, list[_Target]]:
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


def _leaf(name: str, shape: tuple[int, ...]) -> _Target:
    return _Target(shape, lambda view: iter([(name, view)]))


def _stack(pieces: Sequence[_Target], dim: int) -> _Target:
    shape = list(pieces[0].shape)
    axis = dim % (len(shape) + 1)
    shape.insert(axis, len(pieces))

    def places(view: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        for index, piece in enumerate(pieces):
            yield from piece.places(view.select(axis, index))

    return _Target(tuple(shape), places)


def _cat(pieces: Sequence[_Target], dim: int) -> _Target:
    shape = list(pieces[0].shape)
    axis = dim % len(shape)
    shape[axis] = sum(piece.shape[axis] for piece in pieces)

    def places(view: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        start = 0
        for piece in pieces:
            yield from piece.places(view.narrow(axis, start, piece.shape[axis]))
            start += piece.shape[axis]

    return _Target(tuple(shape), places)


def _transpose(piece: _Target, dim0: int, dim1: int) -> _Target:
    order = list(range(len(piece.shape)))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    shape = tuple(piece.shape[axis] for axis in order)
    return _Target(shape, lambda view: piece.places(view.transpose(dim0, dim1)))


def _converted(model: nn.Module, step: Step, *, reader: SourceReader, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return what the step's converter makes, its sources cast before as transformers casts them."""
    converter, layer = deepcopy(step.converter), next(iter(step.targets))
    assert converter is not None
    for pattern, name in step.sources:
        converter.add_tensor(layer, name, pattern, reader.read(name, dtype))
    return convert(converter, layer, model)


def computed(model: nn.Module, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Return the parameter ``name``, which no checkpoint holds, as the model's class initialises it.

    The seed is fixed, so that every run has the same values; a class without a rule of its own has zeros.
    """
    module, attribute = model.get_submodule(parent(name)), name.rpartition(".")[2]
    waiting = module._parameters[attribute]
    assert waiting is not None
    fresh = nn.Parameter(torch.zeros(waiting.shape, dtype=dtype), requires_grad=False)
    others = [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]
    for tensor in others:
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    initialise = getattr(model, "_init_weights", None)
    module._parameters[attribute] = fresh
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            if initialise is not None:
                initialise(module)
    finally:
        module._parameters[attribute] = waiting
    return fresh.detach()
