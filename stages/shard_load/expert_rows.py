"""Where each expert of a mixture lies on disk, so that one can be read without the others.

A tensor of the experts has one row an expert. Some checkpoints hold it stacked, as the model does: a row is a slice.
Others hold expert by expert what the model has stacked: a row is a few tensors of the checkpoint, one after the other,
and no merged copy has to be made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from offstage.stages.checkpoints.dtypes import torch_dtype
from offstage.stages.checkpoints.packed import AtRest, PackedTensor
from offstage.stages.checkpoints.readers import fill_from
from offstage.stages.machine.aligned_memory import room_for

Rows = tuple[tuple[AtRest, ...], ...]
"""For each expert the places that its row is brought from: one after the other, along the row's first dimension."""


def locate_rows(sources: Sequence[AtRest], shape: tuple[int, ...], dtype: str) -> Rows:
    """Return the rows of the tensor of ``shape`` and ``dtype`` that is these ``sources``, one after the other.

    Empty where the tensor isn't that, or a source begins or ends within a row other than at a step of that row's first
    dimension, or rests packed so that no row of it can be read alone.
    """
    steps, width = math.prod(shape[1:2]), math.prod(shape[2:])
    lengths = [math.prod(source.shape) for source in sources]
    if len(shape) < 2 or not math.prod(shape) or sum(lengths) != math.prod(shape):
        return ()
    if any(length % width for length in lengths) or any(source.dtype != dtype for source in sources):
        return ()
    rows: list[list[AtRest]] = [[] for _ in range(shape[0])]
    begin = 0
    for source, length in zip(sources, lengths, strict=True):
        for row, piece in _cut(source, begin, steps=steps, rest=shape[2:]):
            if piece is None:
                return ()
            rows[row].append(piece)
        begin += length // width
    return tuple(map(tuple, rows))


def _cut(source: AtRest, begin: int, *, steps: int, rest: tuple[int, ...]) -> Iterator[tuple[int, AtRest | None]]:
    """Yield the parts of ``source`` that lie in one row each, and which row; null for one that can't be read alone.

    It begins ``begin`` steps into the tensor; a row is ``steps`` long, and a step has the shape ``rest``.
    """
    end = begin + math.prod(source.shape) // math.prod(rest)
    at = begin
    while at < end:
        stop = min(end, (at // steps + 1) * steps)
        yield at // steps, _part(source, at - begin, stop - begin, rest=rest)
        at = stop


def _part(source: AtRest, begin: int, end: int, *, rest: tuple[int, ...]) -> AtRest | None:
    """Return steps ``begin`` to ``end`` of ``source``, each of the shape ``rest``."""
    shape = (end - begin, *rest)
    if shape == source.shape:  # as it is, then: a large model has tens of thousands of them
        return source
    if isinstance(source, PackedTensor):
        steps = math.prod(source.shape[1:]) // math.prod(rest)  # in one of the source's own rows
        return source.codec.rows(source, begin // steps, end // steps) if begin % steps == end % steps == 0 else None
    return replace(source, shape=(end, *rest)).rows(begin, end)


def rows_shape(rows: Rows) -> tuple[int, ...]:
    """Return the shape of the tensor that has these ``rows``."""
    first = rows[0]
    return (len(rows), sum(piece.shape[0] for piece in first), *first[0].shape[1:])


def read_rows(rows: Rows) -> torch.Tensor:
    """Return the tensor that has these ``rows``, on the cpu, in new memory.

    Not for rows of a packed stack, which lies in one piece: those keep its dimensions.
    """
    tensor = room_for(rows_shape(rows), torch_dtype(rows[0][0].dtype)).tensor
    for row, pieces in zip(tensor, rows, strict=True):
        start = 0
        for piece in pieces:
            fill_from(piece, row.narrow(0, start, piece.shape[0]))
            start += piece.shape[0]
    return tensor
