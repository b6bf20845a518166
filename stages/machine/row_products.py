"""Whether the host's kernels give a product by blocks of the weight's rows to the bit: found out once, and kept.

Each number of ``x @ W.T`` depends on one row of ``W`` alone, but a kernel may sum it up in another order where it is
given fewer rows. No table says when: it hangs on the processor, torch's version, the environment and the dtype. What
was found so far: never with ``row_ranges``, in float32, bfloat16 and float16, with AVX-512, AVX2 and SSE4.1, of one
thread or two. A block of less than twelve rows, or one that doesn't end at a multiple of four where the weight goes on,
has other bits in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from offstage.stages.machine.kept_figures import kept_figure
from offstage.stages.machine.kernels import identity
from offstage.stages.machine.own_process import measure_apart

if TYPE_CHECKING:
    import torch  # where it is measured: what was is read without

FILE_NAME = "row_products.json"
LEAST_ROWS = 1024
"""The rows of the smallest block, the last two aside. Each has a power of two times as many."""

_ROWS = 3 * LEAST_ROWS + 3
_COLUMNS = (64, 100, 1408)
_TOKENS = (1, 2, 3, 5, 8, 40, 130)
_SEQUENCES = (2, 4)
"""The matrices have some MB, whose shapes make kernels take each of their ways: one row of the left operand, a few,
many; columns that fill registers and others; rows that end in a rest; and a left operand out of order, as a head has
one that gets the last position of each sequence.
"""
_SEED = 0


def row_ranges(count: int, rows: int) -> list[range]:
    """Return ``count`` rows in blocks of ``rows``, a power of two. None has less than half as many, or all ``count``:
    a short rest is evened out with the block before it.
    """
    ends = [*range(rows, count, rows), count]
    if len(ends) > 1 and count - ends[-2] < rows // 2:
        ends[-2] -= rows // 2
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def exact_dtypes(folder: Path, dtypes: Iterable[str]) -> frozenset[str]:
    """Return those of ``dtypes`` in which a product by ``row_ranges`` has the bits of the whole one on this machine.

    As kept in ``folder``, or found out now, with torch, and kept there. A process of its own is asked: what kernels
    keep for so many shapes, some 70 MB of bfloat16, would stay in this one, and no plan counts it. It does where memory
    is too short for a second process.
    """
    return frozenset(dtype for dtype in dtypes if _is_exact(folder, dtype))


def _is_exact(folder: Path, dtype: str) -> bool:
    apart = partial(measure_apart, "machine.row_products", dtype, here=partial(measure, dtype))
    return kept_figure(folder, FILE_NAME, f"{dtype}; {identity()}", apart, of_user=True) is True


def measure(dtype: str) -> bool:
    """Return whether products in ``dtype`` over a grid of shapes are the same by blocks as whole, with and without a
    bias: a second in all.
    """
    import torch

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
    import torch

    for tokens in _TOKENS:
        yield torch.randn(1, tokens, columns, generator=random).to(dtype)
    for sequences in _SEQUENCES:
        yield torch.randn(sequences, 7, columns, generator=random).to(dtype)[:, -1:, :]


def _is_same(left: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    import torch
    from torch.nn import functional

    whole = functional.linear(left, weight, bias)
    for rows in row_ranges(len(weight), LEAST_ROWS):
        within = slice(rows.start, rows.stop)
        block = functional.linear(left, weight[within], None if bias is None else bias[within])
        if not torch.equal(block, whole[..., within]):
            return False
    return True
