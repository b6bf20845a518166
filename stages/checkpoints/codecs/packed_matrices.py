"""Matrices that are multiplied as they rest: what products are to know of each kind of codec's.

One class serves a codec, and all say the same: how many ``rows`` and ``columns`` there are in use, what the parts
beside the first are called, how some rows are float32 values by torch's operators, and their product by loops.
Parts of one byte a number are ``uint8`` wherever they lie, others of their own dtype. A matrix passes torch's operator
as text, since that takes no objects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from offstage.pipeline.decoding import decode, encode
from offstage.stages.checkpoints.codecs.ggml_blocks import UNPACK
from offstage.stages.checkpoints.codecs.ggml_formats import FORMATS
from offstage.stages.checkpoints.codecs.gguf import GgufCodec, swapped_places
from offstage.stages.checkpoints.codecs.grouped_integers import GroupedIntegers, codes_together, take_apart, zeros_of
from offstage.stages.checkpoints.codecs.loops import (
    FORMATS_OF_LOOPS,
    LANES,
    SCALE_DTYPES,
    Bytes,
    Loops,
    Places,
    ScaleLayout,
    can_multiply_scaled,
)
from offstage.stages.checkpoints.codecs.product_loops import (
    GroupLayout,
    PackedGroups,
    Product,
    ggml_product,
    grouped_product,
    plain_product,
    scaled_product,
)
from offstage.stages.checkpoints.codecs.scaled_codes import PackedScales, ScaledCodes, byte_scales, value_table
from offstage.stages.checkpoints.dtypes import torch_dtype
from offstage.stages.checkpoints.packed import AtRest, PackedTensor
from offstage.stages.units import DTYPE_BYTES

BESIDE = ("_scales", "_above", "_zeros", "_groups")
"""What the names of parts beside a weight end with."""
UPPER = "_up"
"""What the names of the second half of a stack end with, where halves rest each by itself; before the other ends."""


@dataclass(frozen=True, slots=True)
class GgmlMatrix:
    """Rows of blocks of ggml's format ``kind``; those of a GGUF file may be ``swapped`` (see ``Arrangement``)."""

    rows: int
    columns: int
    kind: str
    swapped: tuple[int, int, int, int] | None = None
    beside: ClassVar[tuple[str, ...]] = ()
    reordered: ClassVar[bool] = False

    @classmethod
    def of(cls, source: PackedTensor, codec: GgufCodec) -> Self | None:
        """Return the matrix ``source``, or each of a stack, as such a one; null where its rows aren't whole, in one
        piece, or have no loop.
        """
        order = codec.arrangement
        if order.transposed or order.less or len(source.parts) != 1 or codec.name not in FORMATS_OF_LOOPS:
            return None
        if len(source.shape) == 3 and source.parts[0].shape[:2] != source.shape[:2]:
            return None
        rows, columns = source.shape[-2:]
        return cls(rows, columns, codec.name, order.swapped)

    def values(self, parts: list[Tensor], begin: int, end: int) -> Tensor:
        """Return the float32 values [end - begin, columns] of rows as they lie at rest."""
        return unpack_rows(parts[0][begin:end], self.kind, torch.float32)

    def places(self) -> Places | None:
        """Return where each of the rows at rest is in use; null where they are in order."""
        return None if self.swapped is None else _places(self.rows, self.swapped)

    def product(self, compiled: Loops, parts: list[Tensor]) -> Product:
        """Return the product with the contiguous ``parts``, where they lie, by the loops."""
        return ggml_product(compiled, _bytes(parts[0]), kind=self.kind, places=self.places())


@dataclass(frozen=True, slots=True)
class ScaledMatrix:
    """Rows of codes, each block of ``block_rows`` times ``block_columns`` with a scale of ``scale_dtype``.

    Codes and scales are those of ``ScaledCodes``, and so are ``values`` and ``nested``.
    """

    rows: int
    columns: int
    code: str
    block_rows: int
    block_columns: int
    scale_dtype: str
    divided: bool = False
    values_of_codes: tuple[float, ...] = ()
    nested: PackedScales | None = None
    reordered: ClassVar[bool] = False

    @classmethod
    def of(cls, source: PackedTensor, codec: ScaledCodes) -> Self | None:
        """Return the matrix ``source``, or each of a stack, as such a one; null where runs of columns have no scale."""
        rows, columns = source.shape[-2:] if not codec.transposed else source.shape[:-3:-1]
        _, scales, *more = source.parts
        if not can_multiply_scaled(columns, codec.block_columns) or scales.dtype not in SCALE_DTYPES:
            return None
        if codec.values and columns % codec.block_columns:
            return None
        height, code = min(codec.block_rows, rows), "fp4" if codec.transposed else codec.code
        divided = bool(more) and not codec.nested
        return cls(rows, columns, code, height, codec.block_columns, scales.dtype, divided, codec.values, codec.nested)

    @property
    def beside(self) -> tuple[str, ...]:
        """The ends of the names of what belongs to the weight."""
        return BESIDE[:2] if self.divided or self.nested else BESIDE[:1]

    @property
    def _across(self) -> int:
        """How many scales a line of them has."""
        return -(-self.columns // self.block_columns)

    def values(self, parts: list[Tensor], begin: int, end: int) -> Tensor:
        """Return the float32 values [end - begin, columns] of rows as they lie at rest."""
        codes = parts[0].reshape(-1).view(torch.uint8).view(self.rows, -1)[begin:end]
        single = codes.shape[1] == self.columns
        table = value_table(self.code, self.values_of_codes, single=single)
        values = table[codes.int()].view(torch.float32).view(end - begin, self.columns)
        lines = torch.arange(begin, end) // self.block_rows
        across = torch.arange(self.columns) // self.block_columns
        return values * self._scales(parts, lines)[:, across]

    def _scales(self, parts: list[Tensor], lines: Tensor) -> Tensor:
        """Return some ``lines`` of scales, as float32."""
        _, scales, *above = parts
        kind = torch_dtype(self.scale_dtype)
        codes = scales.reshape(-1).view(torch.uint8).view(-1, self._across * kind.itemsize)[lines]
        if self.nested:
            runs = (lines[:, None] * self._across + torch.arange(self._across)) // self.nested.run
            scaled = torch.tensor(self.nested.values)[codes.int()] * above[0].reshape(-1)[runs]
            return scaled + self.nested.offset
        numbers = byte_scales(self.scale_dtype)[codes.int()] if kind.itemsize == 1 else codes.view(kind).float()
        return numbers / above[0].reshape(-1) if above else numbers

    def places(self) -> None:
        """Return null: rows are in order."""

    def product(self, compiled: Loops, parts: list[Tensor]) -> Product:
        """Return the product with the contiguous ``parts``, where they lie, by the loops."""
        codes, scales, *above = map(_bytes, parts)
        table, nested = self.values_of_codes, self.nested
        runs, across = (self.rows * self._across, 1) if table else (self.rows, self._across)
        layout = ScaleLayout(
            code=self.code,
            scale_dtype=self.scale_dtype,
            inside=0,
            block=(self.block_rows, self.block_columns),
            values=value_table(self.code, table).numpy().view(np.uint64) if table else None,
            above=above[0] if above else None,
            nested=None if nested is None else (np.array(nested.values, np.float32), nested.run, nested.offset),
        )
        lines = scales.reshape(-1, across * int(DTYPE_BYTES[self.scale_dtype]))
        return scaled_product(compiled, codes.reshape(runs, -1), lines, rows=self.rows, layout=layout)


@dataclass(frozen=True, slots=True)
class GroupedMatrix:
    """Integers of so many ``bits`` with a scale and a zero for each ``group`` of inputs: see ``GroupedIntegers``."""

    rows: int
    columns: int
    bits: int
    group: int
    groups: int
    scale_dtype: str
    reordered: bool
    less_one: bool
    interleaved: bool

    @classmethod
    def of(cls, source: PackedTensor, codec: GroupedIntegers) -> Self | None:
        """Return ``source`` as such a matrix; null where its columns are no whole runs."""
        (rows, columns), scales = source.shape, source.parts[1]
        if columns % LANES:
            return None
        groups, how = scales.shape[0], (codec.reordered, codec.less_one, codec.interleaved)
        return cls(rows, columns, codec.bits, codec.group, groups, scales.dtype, *how)

    @property
    def beside(self) -> tuple[str, ...]:
        """The ends of the names of what belongs to the weight."""
        scales, _, zeros, groups = BESIDE
        return (scales, zeros, groups) if self.reordered else (scales, zeros)

    def values(self, parts: list[Tensor], begin: int, end: int) -> Tensor:
        """Return the float32 values [end - begin, columns] of rows as they lie at rest."""
        words, scales, zeros, *order = parts
        of = order[0].long() if order else torch.arange(self.columns) // self.group
        each, period = codes_together(self.bits)
        if self.interleaved:
            first, last = begin // each, -(-end // each)
            codes = take_apart(words[:, first:last, None], self.bits, interleaved=True, dim=2)
            codes = codes.reshape(self.columns, -1)[:, begin - first * each : end - first * each]
        else:
            some = words.view(-1, period, self.rows)[:, :, begin:end]
            codes = take_apart(some, self.bits, interleaved=False, dim=1).reshape(self.columns, -1)
        less = zeros_of(zeros, self.bits, interleaved=self.interleaved, less_one=self.less_one)
        differences = codes - less.view(self.groups, -1)[:, begin:end][of]
        return (differences.float() * scales[:, begin:end].float()[of]).T.contiguous()

    def places(self) -> None:
        """Return null: rows are in order."""

    def product(self, compiled: Loops, parts: list[Tensor]) -> Product:
        """Return the product with the contiguous ``parts``, where they lie, by the loops."""
        codes, scales, zeros, *order = parts
        groups = order[0].detach().numpy() if order else None
        packed = PackedGroups(_bytes(codes), _bytes(scales), _bytes(zeros), groups)
        layout = GroupLayout(self.bits, self.group, self.scale_dtype, self.less_one, self.interleaved)
        return grouped_product(compiled, packed, rows=self.rows, columns=self.columns, layout=layout)


@dataclass(frozen=True, slots=True)
class PlainMatrix:
    """Rows of float32 that rest as they are in use, in whole runs of columns."""

    rows: int
    columns: int
    beside: ClassVar[tuple[str, ...]] = ()
    reordered: ClassVar[bool] = False

    def values(self, parts: list[Tensor], begin: int, end: int) -> Tensor:
        """Return the values [end - begin, columns] of rows."""
        return parts[0][begin:end]

    def places(self) -> None:
        """Return null: rows are in order."""

    def product(self, compiled: Loops, parts: list[Tensor]) -> Product:
        """Return the product with the contiguous ``parts``, where they lie, by the loops."""
        return plain_product(compiled, _bytes(parts[0]))


PackedMatrix = GgmlMatrix | ScaledMatrix | GroupedMatrix | PlainMatrix
_KINDS: Mapping[str, type[PackedMatrix]] = {
    "ggml": GgmlMatrix,
    "scaled": ScaledMatrix,
    "grouped": GroupedMatrix,
    "plain": PlainMatrix,
}


def packed_matrix(source: AtRest) -> PackedMatrix | None:
    """Return ``source``, a matrix or a stack of such, as what products with each know; null where they can't be had."""
    if not isinstance(source, PackedTensor):
        return None
    codec = source.codec
    stack = len(source.shape) == 3 and len(source.parts) == 2 and isinstance(codec, ScaledCodes) and not codec.values
    if isinstance(codec, ScaledCodes) and (stack or len(source.shape) == 2):
        return ScaledMatrix.of(source, codec)
    if isinstance(codec, GgufCodec) and len(source.shape) in (2, 3):
        return GgmlMatrix.of(source, codec)
    return GroupedMatrix.of(source, codec) if isinstance(codec, GroupedIntegers) and len(source.shape) == 2 else None


def halves(source: PackedTensor) -> list[PackedTensor]:
    """Return what ``source`` is one below the other, each by itself: the stacks that a GGUF file has apart; else it."""
    if not isinstance(source.codec, GgufCodec) or len(source.parts) == 1 or len(source.parts[0].shape) != 3:
        return [source]
    codecs = [replace(source.codec, kinds=(kind,)) for kind in source.codec.kinds]
    shapes = [(*part.shape[:2], source.shape[-1]) for part in source.parts]
    return [
        replace(source, codec=codec, parts=(part,), shape=shape)
        for codec, part, shape in zip(codecs, source.parts, shapes, strict=True)
    ]


def parts_of(tensor: PackedTensor, data: Sequence[object]) -> list[Tensor]:
    """Return the bytes ``data`` of the parts of ``tensor`` as products take them: numbers, of one byte as bytes."""
    kinds = [torch_dtype(part.dtype) for part in tensor.parts]
    return [
        torch.as_tensor(array).view(torch.uint8 if kind.itemsize == 1 else kind).view(part.shape)
        for part, kind, array in zip(tensor.parts, kinds, data, strict=True)
    ]


def stacked(matrix: PackedMatrix, pieces: int) -> PackedMatrix | None:
    """Return the matrix that so many like ``matrix`` are, one below the other; null where their parts aren't theirs."""
    if isinstance(matrix, GgmlMatrix):
        return None if matrix.swapped else replace(matrix, rows=pieces * matrix.rows)
    if not isinstance(matrix, ScaledMatrix) or matrix.beside != BESIDE[:1] or matrix.values_of_codes:
        return None
    return replace(matrix, rows=pieces * matrix.rows) if matrix.rows % matrix.block_rows == 0 else None


def without_own_numbers(matrix: PackedMatrix) -> PackedMatrix:
    """Return ``matrix`` as others like it are: of one weight alone is what its scales are looked up in, and added to.

    How long products take doesn't hang on them.
    """
    if not isinstance(matrix, ScaledMatrix) or matrix.nested is None:
        return matrix
    return replace(matrix, nested=replace(matrix.nested, values=(1.0,) * len(matrix.nested.values), offset=0.0))


def can_look_up(matrix: PackedMatrix) -> bool:
    """Return whether rows of ``matrix`` can be unpacked alone: those of ggml's blocks that are in order."""
    return isinstance(matrix, GgmlMatrix) and matrix.swapped is None


def as_text(matrix: PackedMatrix) -> str:
    """Return what ``matrix`` is as text, of which ``of_text`` makes it again."""
    name = next(name for name, kind in _KINDS.items() if isinstance(matrix, kind))
    return json.dumps({"kind": name, "matrix": encode(matrix)})


@lru_cache(maxsize=2**13)
def of_text(text: str) -> PackedMatrix:
    """Return the matrix that ``text`` says: of a model's layers there are a few, or one each."""
    data = json.loads(text)
    return decode(_KINDS[data["kind"]], data["matrix"])


def has_own_rows(matrix: PackedMatrix) -> bool:
    """Return whether some rows of ``matrix`` by themselves are one: what they rest in is theirs alone, and in order."""
    return isinstance(matrix, PlainMatrix) or (isinstance(matrix, GgmlMatrix) and matrix.swapped is None)


@lru_cache(maxsize=2**13)
def of_rows(text: str, rows: int) -> str:
    """Return the text of so many ``rows`` of the matrix of ``text``, where it has them for its own; else ``text``."""
    matrix = of_text(text)
    return as_text(replace(matrix, rows=rows)) if has_own_rows(matrix) and matrix.rows != rows else text


def unpack_rows(packed: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Return the values, in ``dtype``, of ``packed`` […, bytes], rows of blocks of ggml's format ``kind``."""
    form = FORMATS[kind]
    blocks = packed.reshape(-1, form.bytes)
    values = torch.empty((len(blocks), form.elements), dtype=torch.float32, device=packed.device)
    UNPACK[kind](blocks, values)
    return values.to(dtype).view(*packed.shape[:-1], packed.shape[-1] // form.bytes * form.elements)


@lru_cache(maxsize=64)
def _places(rows: int, sizes: tuple[int, int, int, int]) -> Places:
    """Return where each of the file's ``rows`` is in use."""
    return swapped_places(np.arange(rows), sizes)


def _bytes(part: Tensor) -> Bytes:
    raw: Bytes = part.detach().view(torch.uint8).numpy()
    return raw
