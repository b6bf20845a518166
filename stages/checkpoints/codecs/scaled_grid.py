"""Values of a matrix times a scale for each block of it, by torch's operators: on any device, and without copies."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch


def multiply_blocks(
    values: torch.Tensor, scales: torch.Tensor, made: torch.Tensor, *, rows: int, columns: int, skipped: int
) -> None:
    """Write to ``made`` (height, width) the products of ``values`` and their ``scales`` (down, across).

    A scale is that of ``rows`` times ``columns`` values; of the first ones, ``skipped`` rows aren't there. A product is
    one of float32, rounded to the dtype of ``made``.
    """
    for top, bottom in _runs(len(values), rows, skipped):
        for left, right in _runs(values.shape[1], columns, 0):
            down, across = max(1, (bottom - top) // rows), max(1, (right - left) // columns)
            first, second = (skipped + top) // rows, left // columns
            some = scales[first : first + down, second : second + across][:, None, :, None]
            part = slice(top, bottom), slice(left, right)
            torch.mul(_grid(values[part], down, across), some, out=_grid(made[part], down, across))


def _grid(matrix: torch.Tensor, down: int, across: int) -> torch.Tensor:
    """Return ``matrix`` as (down, rows of a block, across, columns of a block)."""
    rows, columns = matrix.shape
    return matrix.view(down, rows // down, across, columns // across)


def _runs(count: int, size: int, skipped: int) -> Iterator[tuple[int, int]]:
    """Yield ``count`` lines in runs: whole blocks of ``size`` together, those that are cut at either end alone."""
    lead = min(count, -skipped % size)
    whole = (count - lead) // size * size
    yield from ((begin, end) for begin, end in pairwise((0, lead, lead + whole, count)) if begin < end)
