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

from stages.checkpoints.dtypes import torch_dtype
from stages.checkpoints.extents import Extent
from stages.checkpoints.readers import fill_from
from stages.machine.aligned_memory import room_for

Rows = tuple[tuple[Extent, ...], ...]
"""For each expert the extents that are its row: one after the other, as they are, along the row's first dimension."""


def locate_rows(extents: Sequence[Extent], shape: tuple[int, ...], dtype: str) -> Rows:
    """Return the rows of the tensor of ``shape`` and ``dtype`` that is these ``extents``, one after the other.

    Empty where the tensor isn't that, or an extent begins or ends within a row other than at a step of that row's first
    dimension.
    """
    steps, width = math.prod(shape[1:2]), math.prod(shape[2:])
    lengths = [math.prod(extent.shape) for extent in extents]
    if len(shape) < 2 or not math.prod(shape) or sum(lengths) != math.prod(shape):
        return ()
    if any(length % width for length in lengths) or any(extent.dtype != dtype for extent in extents):
        return ()
    rows: list[list[Extent]] = [[] for _ in range(shape[0])]
    begin = 0
    for extent, length in zip(extents, lengths, strict=True):
        for row, piece in _cut(extent, begin, steps=steps, rest=shape[2:]):
            rows[row].append(piece)
        begin += length // width
    return tuple(map(tuple, rows))


def _cut(extent: Extent, begin: int, *, steps: int, rest: tuple[int, ...]) -> Iterator[tuple[int, Extent]]:
    """Yield the parts of ``extent`` that lie in one row each, and which row.

    It begins ``begin`` steps into the tensor; a row is ``steps`` long, and a step has the shape ``rest``.
    """
    piece = replace(extent, shape=(1, *rest))
    end = begin + math.prod(extent.shape) // math.prod(rest)
    at = begin
    while at < end:
        stop = min(end, (at // steps + 1) * steps)
        shape = (stop - at, *rest)
        whole = shape == extent.shape  # as it is, then: a large model has tens of thousands of them
        offset = extent.begin + (at - begin) * piece.bytes
        yield at // steps, extent if whole else replace(extent, begin=offset, shape=shape)
        at = stop


def rows_shape(rows: Rows) -> tuple[int, ...]:
    """Return the shape of the tensor that has these ``rows``."""
    first = rows[0]
    return (len(rows), sum(piece.shape[0] for piece in first), *first[0].shape[1:])


def read_rows(rows: Rows) -> torch.Tensor:
    """Return the tensor that has these ``rows``, on the cpu, in new memory."""
    tensor = room_for(rows_shape(rows), torch_dtype(rows[0][0].dtype)).tensor
    for row, pieces in zip(tensor, rows, strict=True):
        start = 0
        for piece in pieces:
            fill_from(piece, row.narrow(0, start, piece.shape[0]))
            start += piece.shape[0]
    return tensor
