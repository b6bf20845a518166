"""Products of rows with weights that stay packed: they are unpacked as they are multiplied, never a weight whole.

Given float32, each number is the sum of the unpacked float32 values times those given, in one order: a lane for each of
32 columns adds up those that are 32 apart, first to last, a product and its sum rounded once; then lanes are added in
halves. So the bits hang neither on how many rows are given nor on threads, nor on what computes: the compiled loops, or
torch's operators, which are their oracle and serve where there is no compiler.

Rows of bfloat16 are multiplied as they are by processors that add up products of its pairs (AVX512-BF16), at twice the
speed. The values are rounded to bfloat16 then, as they are where they are dequantised before products. A lane for each
of the pairs of 64 columns adds the product of the second, then that of the first; all else is the same. Numbers below
2⁻¹²⁶, which such processors take for zero, are the one difference to the operators'.

Or they are multiplied in tiles, for which a processor has instructions of their own (AMX): several times as fast where
many rows are given, and slower for one. Each 32 columns are a tile: products of their first, third … are added up,
those of the second, fourth … too, then both, and that to the sum of the tiles before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offstage.stages.checkpoints.codecs.loops import LANES, Way, loops
from offstage.stages.checkpoints.codecs.packed_matrices import of_text
from offstage.stages.checkpoints.codecs.product_loops import Product

_SCRATCH = 2**20
"""How many values torch's operators make at once."""
_NAME = "multiply_packed"
_KEPT = 2**13
"""For so many places products are kept, some hundred bytes each: a model's layers, and its experts in their slots."""
_products: dict[tuple[object, ...], Product] = {}

_library = torch.library.Library("offstage", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    f"{_NAME}(Tensor given, Tensor[] parts, str matrix_text, Tensor? bias, ScalarType? compute, bool tiles) -> Tensor"
)  # type: ignore[no-untyped-call]


def multiply_packed(
    given: Tensor,
    parts: Sequence[Tensor],
    matrix_text: str,
    bias: Tensor | None = None,
    *,
    compute: torch.dtype | None = None,
    tiles: bool = False,
) -> Tensor:
    """Return the products […, rows] of ``given`` […, columns], floats of any kind, with the matrix that rests in
    ``parts`` as ``matrix_text`` says (``packed_matrices.as_text``).

    What is given is rounded to the dtype ``compute`` first, if there is one; if that is bfloat16, products may be made
    in ``tiles``, by torch's operators where the processor has none. Products are added up in float32, a
    ``bias`` [rows] too, and rounded to the dtype of what is given.
    """
    products: Tensor = torch.ops.offstage.multiply_packed(given, parts, matrix_text, bias, compute, tiles)
    return products


def by_operators(
    given: Tensor, parts: Sequence[Tensor], matrix_text: str, bias: Tensor | None = None, *, way: Way = "floats"
) -> Tensor:
    """Return the products of ``given`` by torch's operators, added up in the order of the ``way``.

    They have the dtype of what is given.
    """
    matrix, rows_given = of_text(matrix_text), given.float().reshape(-1, given.shape[-1])
    rows, columns, count, row_places = matrix.rows, matrix.columns, len(rows_given), matrix.places()
    places = torch.arange(rows) if row_places is None else torch.from_numpy(row_places)
    runs, products = rows_given.view(count, 1, -1, LANES), rows_given.new_empty((count, rows))
    step = max(1, _SCRATCH // (columns + 2 * count * max(LANES, columns // LANES)))
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        values = matrix.values([*parts], begin, end).view(1, end - begin, -1, LANES)
        values = values if way == "floats" else values.bfloat16().float()
        products[:, places[begin:end]] = _in_tiles(values, runs) if way == "tiles" else _in_lanes(values, runs, way)
    if bias is not None:
        products += bias
    return products.to(given.dtype).view(*given.shape[:-1], rows)


def _in_lanes(values: Tensor, given: Tensor, way: Way) -> Tensor:
    """Return the products [count, rows] of ``values`` [1, rows, runs, 32] and ``given`` [count, 1, runs, 32]."""
    halves, turns = (2, (slice(1, None, 2), slice(0, None, 2))) if way == "pairs" else (1, (slice(None),))
    sums = [given.new_zeros((len(given), values.shape[1], LANES // halves))] * halves
    for run in range(values.shape[2]):
        for turn in turns:
            sums[run % halves] = fused(values[:, :, run, turn], given[:, :, run, turn], sums[run % halves])
    lanes = torch.cat(sums, -1)
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def _in_tiles(values: Tensor, given: Tensor) -> Tensor:
    """Return the same, of which each run is a tile."""
    first, second = (given.new_zeros(len(given), *values.shape[1:3]) for _ in range(2))
    for at in range(0, LANES, 2):
        first = fused(values[..., at], given[..., at], first)
        second = fused(values[..., at + 1], given[..., at + 1], second)
    tiles = first + second
    total = torch.zeros_like(tiles[..., 0])
    for run in range(tiles.shape[2]):
        total = total + tiles[..., run]
    return total


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


def _on_host(
    given: Tensor, parts: list[Tensor], matrix_text: str, bias: Tensor | None, compute: torch.dtype | None, tiles: bool
) -> Tensor:
    parts, rounded = [part.contiguous() for part in parts], given if compute is None else given.to(compute)
    product, rounds = _product(matrix_text, parts), rounded.dtype == torch.bfloat16
    way: Way | None = "floats" if product is None or not rounds else product.way(tiles=tiles)
    if product is None or way is None:
        own: Way = "tiles" if tiles and rounds else "floats"
        return by_operators(rounded, parts, matrix_text, bias, way=own).to(given.dtype)
    numbers = (rounded.float() if way == "floats" else rounded).contiguous()
    rounds, (*leading, columns) = way != "floats" and given.dtype == torch.bfloat16, given.shape
    products = given.new_empty((*leading, product.rows), dtype=given.dtype if rounds else torch.float32)
    added = None if bias is None else bias.float()
    assert columns == product.columns
    assert added is None or added.shape == (product.rows,)
    product.run(
        numbers.data_ptr(), products.data_ptr(), given.numel() // columns, threads=torch.get_num_threads(), way=way,
        rounds=rounds, bias=None if added is None else added.data_ptr(),
    )  # fmt: skip
    return products if products.dtype == given.dtype else products.to(given.dtype)


def _product(matrix_text: str, parts: list[Tensor]) -> Product | None:
    """Return the product with ``parts``, made once for where they lie: places among them are looked at each time.

    Null where there are no loops.
    """
    place = (matrix_text, *((part.data_ptr(), part.nbytes) for part in parts))
    product = _products.get(place)
    if product is not None:
        return product
    compiled, matrix = loops(), of_text(matrix_text)
    if compiled is None:
        return None
    new = matrix.product(compiled, parts)
    if not matrix.reordered:
        if len(_products) >= _KEPT:
            _products.clear()
        _products[place] = new
    return new


def _on_meta(
    given: Tensor, parts: list[Tensor], matrix_text: str, bias: Tensor | None, compute: torch.dtype | None, tiles: bool
) -> Tensor:
    return given.new_empty((*given.shape[:-1], of_text(matrix_text).rows))


_library.impl(_NAME, _on_host, "CPU")  # type: ignore[no-untyped-call]
_library.impl(_NAME, _on_meta, "Meta")  # type: ignore[no-untyped-call]
