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
from offstage.stages.checkpoints.codecs.scaled_codes import ScaledCodes
from offstage.stages.checkpoints.packed import AtRest, PackedTensor

FP8 = "fp8"
LANES = 32
"""How many sums each number is added up in, side by side."""
_SCRATCH = 2**20
"""How many values torch's operators make at once."""
_NAME = "multiply_packed"

_library = torch.library.Library("offstage", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    f"{_NAME}(Tensor given, Tensor packed, str kind, int[] layout, Tensor? scales) -> Tensor"
)


def can_multiply(source: AtRest) -> TypeGuard[PackedTensor]:
    """Return whether products with ``source``, a matrix, can be had as it rests: its rows whole, in one piece, or in
    codes of FP8 with scales for blocks that are whole runs of columns.
    """
    if not isinstance(source, PackedTensor) or len(source.shape) != 2:
        return False
    codec, columns = source.codec, source.shape[1]
    if isinstance(codec, GgufCodec):
        plain = not codec.arrangement.transposed and not codec.arrangement.less
        return plain and len(source.parts) == 1 and codec.name in FORMATS_OF_LOOPS
    if not isinstance(codec, ScaledCodes) or codec.name != FP8 or len(source.parts) != 2:
        return False
    whole = columns % LANES == 0 and (codec.block_columns % LANES == 0 or codec.block_columns >= columns)
    return whole and source.parts[1].dtype in ("float32", "bfloat16", "float16")


def layout_of(source: PackedTensor) -> tuple[int, ...]:
    """Return what products with ``source`` are to know of where its values lie: of blocks of ggml the order of the
    rows, of codes of FP8 the rows and columns that share a scale.
    """
    codec = source.codec
    if isinstance(codec, GgufCodec):
        return codec.arrangement.swapped or ()
    assert isinstance(codec, ScaledCodes)
    return codec.block_rows, codec.block_columns


def multiply_packed(
    given: Tensor, packed: Tensor, kind: str, layout: Sequence[int], scales: Tensor | None = None
) -> Tensor:
    """Return the products [rows given, rows], in float32, of ``given`` [rows given, columns], of float32 in one piece,
    with ``packed`` [rows, bytes]: blocks of ggml's format ``kind``, or of FP8 codes, which have ``scales`` [blocks
    down, blocks across] of float32. ``layout`` is that of ``layout_of``.
    """
    made: Tensor = torch.ops.offstage.multiply_packed(given, packed, kind, layout, scales)
    return made


def unpack_rows(packed: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Return the values, in ``dtype``, of ``packed`` […, bytes], rows of blocks of ggml's format ``kind``."""
    form = FORMATS[kind]
    blocks = packed.reshape(-1, form.bytes)
    values = torch.empty((len(blocks), form.elements), dtype=torch.float32, device=packed.device)
    UNPACK[kind](blocks, values)
    return values.to(dtype).view(*packed.shape[:-1], packed.shape[-1] // form.bytes * form.elements)


def by_operators(
    given: Tensor, packed: Tensor, kind: str, layout: Sequence[int], scales: Tensor | None = None
) -> Tensor:
    """Return the same, computed by torch's operators."""
    (count, columns), rows = given.shape, len(packed)
    swapped = bool(layout) and scales is None
    places = torch.from_numpy(_places(rows, tuple(layout))) if swapped else torch.arange(rows)
    runs = given.view(count, 1, -1, LANES)
    made = given.new_empty((count, rows))
    step = max(1, _SCRATCH // (columns + 2 * count * LANES))
    for begin in range(0, rows, step):
        some = packed[begin : begin + step]
        values = unpack_rows(some, kind, torch.float32) if scales is None else _of_fp8(some, begin, layout, scales)
        parts = values.view(1, len(some), -1, LANES)
        lanes = given.new_zeros((count, len(some), LANES))
        for run in range(columns // LANES):
            lanes += parts[:, :, run] * runs[:, :, run]
        while lanes.shape[-1] > 1:
            half = lanes.shape[-1] // 2
            lanes = lanes[..., :half] + lanes[..., half:]
        made[:, places[begin : begin + step]] = lanes[..., 0]
    return made


def _of_fp8(codes: Tensor, begin: int, block: Sequence[int], scales: Tensor) -> Tensor:
    """Return the values of rows of FP8 ``codes``, the first of which is number ``begin`` of the matrix."""
    height, width = block
    lines = scales[torch.arange(begin, begin + len(codes)) // height]
    across = torch.arange(codes.shape[1]) // width
    return codes.view(torch.float8_e4m3fn).float() * lines[:, across]


def _on_host(given: Tensor, packed: Tensor, kind: str, layout: Sequence[int], scales: Tensor | None) -> Tensor:
    known, threads = loops(), torch.get_num_threads()
    if known is None:
        return by_operators(given, packed, kind, layout, scales)
    made = given.new_empty((len(given), len(packed)))
    arrays = (tensor.detach().numpy() for tensor in (given, packed, made))
    if scales is not None:
        height, width = layout
        known.multiply_fp8(*arrays, scales=scales.detach().numpy(), block=(height, width), threads=threads)
        return made
    places = _places(len(packed), tuple(layout)) if layout else None
    known.multiply_ggml(*arrays, kind=kind, places=places, threads=threads)
    return made


def _on_meta(given: Tensor, packed: Tensor, kind: str, layout: Sequence[int], scales: Tensor | None) -> Tensor:
    return given.new_empty((len(given), len(packed)))


@lru_cache(maxsize=64)
def _places(rows: int, sizes: tuple[int, int, int, int]) -> Places:
    """Return where each of the file's ``rows`` is in use."""
    return swapped_places(np.arange(rows), sizes)


_library.impl(_NAME, _on_host, "CPU")  # type: ignore[no-untyped-call]
_library.impl(_NAME, _on_meta, "Meta")  # type: ignore[no-untyped-call]
