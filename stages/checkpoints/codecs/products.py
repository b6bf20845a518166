"""Products of rows with weights that stay packed: blocks are unpacked as they are multiplied, never a weight whole.

Each number is the sum of the unpacked float32 values times those given, in one order: a lane for each of 32 columns
adds up those that are 32 apart, first to last; then lanes are added in halves. A product and a sum are rounded one
after the other. So the bits hang neither on how many rows are given nor on threads, nor on what computes: the compiled
loops, or torch's operators, which are their oracle and serve where there is no compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from offstage.stages.checkpoints.codecs.ggml_blocks import UNPACK
from offstage.stages.checkpoints.codecs.ggml_formats import FORMATS
from offstage.stages.checkpoints.codecs.gguf import GgufCodec, swapped_places
from offstage.stages.checkpoints.codecs.loops import FORMATS_OF_LOOPS, Places, loops
from offstage.stages.checkpoints.packed import AtRest, PackedTensor

LANES = 32
"""How many sums each number is added up in, side by side."""
_SCRATCH = 2**20
"""How many values torch's operators make at once."""
_NAME = "multiply_packed"

_library = torch.library.Library("offstage", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(f"{_NAME}(Tensor given, Tensor packed, str kind, int[] swapped) -> Tensor")  # type: ignore[no-untyped-call]


def can_multiply(source: AtRest) -> TypeGuard[PackedTensor]:
    """Return whether products with ``source``, a matrix, can be had as it rests: in one piece, its rows whole."""
    if not isinstance(source, PackedTensor) or not isinstance(source.codec, GgufCodec):
        return False
    arrangement = source.codec.arrangement
    plain = not arrangement.transposed and not arrangement.less and len(source.shape) == 2
    return plain and len(source.parts) == 1 and source.codec.name in FORMATS_OF_LOOPS


def multiply_packed(given: Tensor, packed: Tensor, kind: str, swapped: Sequence[int]) -> Tensor:
    """Return the products [rows given, rows], in float32, of ``given`` [rows given, columns], of float32 in one piece,
    with ``packed`` [rows, bytes], blocks of ggml's format ``kind``; the order of its rows is ``swapped``, if it is.
    """
    made: Tensor = torch.ops.offstage.multiply_packed(given, packed, kind, swapped)
    return made


def unpack_rows(packed: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Return the values, in ``dtype``, of ``packed`` […, bytes], rows of blocks of ggml's format ``kind``."""
    form = FORMATS[kind]
    blocks = packed.reshape(-1, form.bytes)
    values = torch.empty((len(blocks), form.elements), dtype=torch.float32, device=packed.device)
    UNPACK[kind](blocks, values)
    return values.to(dtype).view(*packed.shape[:-1], packed.shape[-1] // form.bytes * form.elements)


def by_operators(given: Tensor, packed: Tensor, kind: str, swapped: Sequence[int]) -> Tensor:
    """Return the same, computed by torch's operators."""
    (count, columns), rows = given.shape, len(packed)
    places = torch.from_numpy(_places(rows, tuple(swapped))) if swapped else torch.arange(rows)
    runs = given.view(count, 1, -1, LANES)
    made = given.new_empty((count, rows))
    step = max(1, _SCRATCH // (columns + 2 * count * LANES))
    for begin in range(0, rows, step):
        some = packed[begin : begin + step]
        parts = unpack_rows(some, kind, torch.float32).view(1, len(some), -1, LANES)
        lanes = given.new_zeros((count, len(some), LANES))
        for run in range(columns // LANES):
            lanes += parts[:, :, run] * runs[:, :, run]
        while lanes.shape[-1] > 1:
            half = lanes.shape[-1] // 2
            lanes = lanes[..., :half] + lanes[..., half:]
        made[:, places[begin : begin + step]] = lanes[..., 0]
    return made


def _on_host(given: Tensor, packed: Tensor, kind: str, swapped: Sequence[int]) -> Tensor:
    known = loops()
    if known is None:
        return by_operators(given, packed, kind, swapped)
    made = given.new_empty((len(given), len(packed)))
    places = _places(len(packed), tuple(swapped)) if swapped else None
    arrays = (tensor.detach().numpy() for tensor in (given, packed, made))
    known.multiply_ggml(*arrays, kind=kind, places=places, threads=torch.get_num_threads())
    return made


def _on_meta(given: Tensor, packed: Tensor, kind: str, swapped: Sequence[int]) -> Tensor:
    return given.new_empty((len(given), len(packed)))


@lru_cache(maxsize=64)
def _places(rows: int, sizes: tuple[int, int, int, int]) -> Places:
    """Return where each of the file's ``rows`` is in use."""
    return swapped_places(np.arange(rows), sizes)


_library.impl(_NAME, _on_host, "CPU")  # type: ignore[no-untyped-call]
_library.impl(_NAME, _on_meta, "Meta")  # type: ignore[no-untyped-call]
