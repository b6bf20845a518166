"""Products of rows with weights that stay packed: they are unpacked as they are multiplied, never a weight whole.

Each number is the sum of the unpacked float32 values times those given, in one order: a lane for each of 32 columns
adds up those that are 32 apart, first to last, a product and its sum rounded once; then lanes are added in halves. So
the bits hang neither on how many rows are given nor on threads, nor on what computes: the compiled loops, or torch's
operators, which are their oracle and serve where there is no compiler.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offstage.stages.checkpoints.codecs.loops import LANES, loops
from offstage.stages.checkpoints.codecs.packed_matrices import of_text
from offstage.stages.checkpoints.codecs.product_loops import Product

_SCRATCH = 2**20
"""How many values torch's operators make at once."""
_NAME = "multiply_packed"
_KEPT = 2**13
"""For so many places products are kept, some hundred bytes each: a model's layers, and its experts in their slots."""
_products: dict[tuple[object, ...], Product] = {}

_library = torch.library.Library("offstage", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(f"{_NAME}(Tensor given, Tensor[] parts, str told) -> Tensor")  # type: ignore[no-untyped-call]


def multiply_packed(given: Tensor, parts: Sequence[Tensor], told: str) -> Tensor:
    """Return the products [rows given, rows], in float32, of ``given`` [rows given, columns], of float32 in one piece,
    with the matrix that rests in ``parts`` as is ``told`` (``packed_matrices.as_text``).
    """
    made: Tensor = torch.ops.offstage.multiply_packed(given, parts, told)
    return made


def by_operators(given: Tensor, parts: list[Tensor], told: str) -> Tensor:
    """Return the same, computed by torch's operators."""
    matrix, count = of_text(told), len(given)
    rows, columns, found = matrix.rows, matrix.columns, matrix.places()
    places = torch.arange(rows) if found is None else torch.from_numpy(found)
    runs = given.view(count, 1, -1, LANES)
    made = given.new_empty((count, rows))
    step = max(1, _SCRATCH // (columns + 2 * count * LANES))
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        values = matrix.values(parts, begin, end).view(1, end - begin, -1, LANES)
        lanes = given.new_zeros((count, end - begin, LANES))
        for run in range(columns // LANES):
            lanes = fused(values[:, :, run], runs[:, :, run], lanes)
        while lanes.shape[-1] > 1:
            half = lanes.shape[-1] // 2
            lanes = lanes[..., :half] + lanes[..., half:]
        made[:, places[begin:end]] = lanes[..., 0]
    return made


def fused(left: Tensor, right: Tensor, more: Tensor) -> Tensor:
    """Return ``left`` times ``right`` plus ``more``, of float32, rounded once: what processors do in one step.

    In float64 the product is exact, and the sum may not be. Of the two numbers beside such a sum the one that is odd in
    its last bit is taken: that rounds to float32 as the exact sum does (Boldo and Melquiond, 2008).
    """
    product, addend = left.double() * right.double(), more.double()
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(torch.int64)
    away = torch.where((error > 0) == (total > 0), 1, -1)
    inexact = (error.abs() > 0) & (bits & 1 == 0)
    return torch.where(inexact, bits + away, bits).view(torch.float64).float()


def _on_host(given: Tensor, parts: list[Tensor], told: str) -> Tensor:
    parts = [part.contiguous() for part in parts]
    product = _product(told, parts)
    if product is None:
        return by_operators(given, parts, told)
    made = given.new_empty((len(given), product.rows))
    assert given.shape[1] == product.columns
    product.run(given.data_ptr(), made.data_ptr(), len(given), threads=torch.get_num_threads())
    return made


def _product(told: str, parts: list[Tensor]) -> Product | None:
    """Return the product with ``parts``, made once for where they lie: places among them are looked at each time.

    Null where there are no loops.
    """
    place = (told, *((part.data_ptr(), part.nbytes) for part in parts))
    found = _products.get(place)
    if found is not None:
        return found
    known, matrix = loops(), of_text(told)
    if known is None:
        return None
    made = matrix.product(known, parts)
    if not matrix.reordered:
        if len(_products) >= _KEPT:
            _products.clear()
        _products[place] = made
    return made


def _on_meta(given: Tensor, parts: list[Tensor], told: str) -> Tensor:
    return given.new_empty((len(given), of_text(told).rows))


_library.impl(_NAME, _on_host, "CPU")  # type: ignore[no-untyped-call]
_library.impl(_NAME, _on_meta, "Meta")  # type: ignore[no-untyped-call]
