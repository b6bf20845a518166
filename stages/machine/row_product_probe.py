"""Comparing products by blocks of rows with whole ones, bit by bit, over a grid of shapes: a second in all.

The matrices have some MB, whose shapes make kernels take each of their ways: one row of the left operand, a few, many;
columns that fill registers and others; rows that end in a rest; and a left operand out of order, as a head has one that
gets the last position of each sequence.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product

import torch
from torch.nn import functional

from offstage.stages.machine.row_ranges import LEAST_ROWS, row_ranges

_ROWS = 3 * LEAST_ROWS + 3
_COLUMNS = (64, 100, 1408)
_TOKENS = (1, 2, 3, 5, 8, 40, 130)
_SEQUENCES = (2, 4)
_SEED = 0


def be_measured() -> None:
    """Be the process that is asked: print whether products are the same in the dtype that it is given."""
    sys.stdout.write(str(is_exact_by_rows(sys.argv[1])))


def is_exact_by_rows(dtype: str) -> bool:
    """Return whether every product of the grid in ``dtype`` is the same by blocks as whole, with and without a bias."""
    kind: torch.dtype = getattr(torch, dtype)
    random = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for columns in _COLUMNS:
            weight = torch.randn(_ROWS, columns, generator=random).to(kind)
            biases = (None, torch.randn(_ROWS, generator=random).to(kind))
            lefts = _lefts(columns, kind, random)
            if not all(_is_same(left, weight, bias) for left, bias in product(lefts, biases)):
                return False
    return True


def _lefts(columns: int, dtype: torch.dtype, random: torch.Generator) -> Iterator[torch.Tensor]:
    for tokens in _TOKENS:
        yield torch.randn(1, tokens, columns, generator=random).to(dtype)
    for sequences in _SEQUENCES:
        yield torch.randn(sequences, 7, columns, generator=random).to(dtype)[:, -1:, :]


def _is_same(left: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    whole = functional.linear(left, weight, bias)
    for rows in row_ranges(len(weight), LEAST_ROWS):
        within = slice(rows.start, rows.stop)
        block = functional.linear(left, weight[within], None if bias is None else bias[within])
        if not torch.equal(block, whole[..., within]):
            return False
    return True
