"""Products by the loops of ``loops.c``: what is looked at once for each weight, and run for all that is given to it.

A model makes some hundred products a token, many of which take as long as looking at their arrays does. So a product
is made for a weight where it lies, sizes held against the arrays; a call says only what is multiplied, and where to.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import Structure, addressof, byref, c_int64, c_void_p, cast
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from offstage.stages.checkpoints.codecs.ggml_formats import FORMATS
from offstage.stages.checkpoints.codecs.loops import (
    DTYPE_NUMBERS,
    FORMAT_NUMBERS,
    LANES,
    PLAIN_NUMBER,
    SCALE_NUMBERS,
    WAY_NUMBERS,
    Bytes,
    LoopArguments,
    Loops,
    Places,
    ScaleLayout,
    Way,
    can_multiply_scaled,
    pointers,
    scaled_work,
)
from offstage.stages.units import DTYPE_BYTES

_TOGETHER = 12
"""By how many rows of a weight threads share them, or several times as many: whole runs of what registers sum up."""
_PANEL_VALUES = 6 * 2**14
"""How many values a thread unpacks at a time where several rows are multiplied, at most: part of a core's own cache."""
_AT_ONCE = 4
"""How many rows given are laid out side by side, where a weight is unpacked."""
_BLOCK, _SHARING = 24, 16
"""How many rows that were unpacked, and how many rows given, are multiplied while all of their sums are kept."""
_PADDING = 64
"""How many bytes further apart than they are long rows lie that were unpacked for tiles."""
_WIDE = 64
"""How many rows of a weight in columns are multiplied side by side."""
_TILE, _TILES_VALUES = 16, 2**19
"""Of products in tiles: for up to so many rows given, few rows of a weight are unpacked at a time; for more, rows of so
many values at most, which a core's second cache holds.
"""
_SHARES, _LEAST = 4, 2**20
"""In so many steps each thread takes rows, of no fewer products than ``_LEAST``: one that another process holds up has
fewer. A step begins with what nothing has fetched yet.
"""
_LINE = 64
_GGML, _SCALED, _GROUPED = range(3)
_NUMBERS = ("family", "way", "rounds", "rows", "columns", "count", "step", "room", "next_row", "next_room")


class _ProductArguments(Structure):
    """``Product`` in ``loops.c``."""

    _fields_ = [
        *((name, c_void_p) for name in ("work", "given", "made", "rooms", "laid", "places", "values", "bias")),
        *((name, c_int64) for name in _NUMBERS),
    ]


class PackedGroups(NamedTuple):
    """Integers in groups as they rest: bytes of codes, scales and zeros, and the group of each input where these are in
    no order.
    """

    codes: Bytes
    scales: Bytes
    zeros: Bytes
    order: npt.NDArray[np.int32] | None


class GroupLayout(NamedTuple):
    """What these mean: codes of so many ``bits``, a scale of ``scale_dtype`` and a zero for each ``group`` of inputs.

    Zeros may rest ``less_one``; ``interleaved`` codes lie as AWQ's.
    """

    bits: int
    group: int
    scale_dtype: str
    less_one: bool
    interleaved: bool


class Product:
    """The product with one weight where it lies, which ``work`` tells of: of ``rows`` and ``columns``, of a ``family``.

    A thread has ``room`` floats beside what it unpacks to, and ``tables`` are kept, as ``work`` is: not the weight. Any
    threads may run it side by side.
    """

    def __init__(
        self,
        compiled: Loops,
        work: LoopArguments,
        family: int,
        *,
        rows: int,
        columns: int,
        room: int = 0,
        tables: Mapping[str, npt.NDArray[Any] | None] = MappingProxyType({}),
    ) -> None:
        self._function, self._kept = compiled.library.multiply_packed, (work, tables)
        self._known = compiled
        self._in_columns, self.rows, self.columns, self._room = family == _GROUPED, rows, columns, room
        self._arguments = _ProductArguments(work=addressof(work), family=family, rows=rows, columns=columns)
        self._arguments.places, self._arguments.values = pointers(tables.get("places"), tables.get("values"))

    def way(self, *, tiles: bool) -> Way | None:
        """Return in which way rows of bfloat16 are multiplied, in ``tiles`` or not; null where none can be here."""
        if not tiles:
            return self._known.way_of_bfloat16
        return "tiles" if self._known.has_tiles else None

    def run(self, given: int, made: int, count: int, *, bias: int | None, threads: int, way: Way, rounds: bool) -> None:
        """Write the products of ``count`` rows at the address ``given`` [count, columns], each with the ``bias`` of its
        row, if any, to that of ``made`` [count, rows], in so many ``threads``, which share the rows of the weight.

        The bias is float32. So is what is given in the ``way`` of floats, in that of bfloat16 it is such; and what is
        made is float32, or bfloat16 where it ``rounds``. The bits are the same for any number of threads.
        """
        product = _ProductArguments.from_buffer_copy(self._arguments)
        together, room, laid = self._shares(count, threads, way)
        if room:
            rooms = np.empty(threads * room + laid + _LINE // 4, np.float32)  # whole lines of a cache are read at once
            product.rooms = -(-rooms.ctypes.data // _LINE) * _LINE
            product.laid = product.rooms + 4 * threads * room if laid else None
        product.given, product.made, product.count, product.room = given, made, count, room
        product.bias, product.way, product.rounds = bias, WAY_NUMBERS[way], rounds
        steps = threads * max(1, min(_SHARES, self.rows * self.columns * count // (threads * _LEAST)))
        product.step = -(-self.rows // (steps * together)) * together
        self._function(byref(product), threads, _team())

    def _shares(self, count: int, threads: int, way: Way) -> tuple[int, int, int]:
        """Return by how many rows of the weight threads share them, how many floats each has room for, and how many are
        taken by what is given, where it is laid out.
        """
        size = 4 if way == "floats" else 2
        if way == "tiles":
            if self._in_columns:
                return _WIDE, self._room + _WIDE * (self.columns if count > _TILE else LANES) // 2, 0
            most = min(_TILES_VALUES // self.columns, self.rows // (4 * threads)) if count > _TILE else _WIDE
            together = _WIDE * max(1, most // _WIDE)
            laid = count * self.columns // 2 if count > 1 else 0
            return together, together * (self.columns * size + _PADDING) // 4, laid
        together = _WIDE if self._in_columns else _TOGETHER
        if count < self._known.given_to_unpack[self._in_columns]:
            return together, self._room, 0
        if not self._in_columns:
            together *= max(1, min(_PANEL_VALUES // self.columns, self.rows // (4 * threads)) // together)
        line = -(-self.columns * size // (4 * LANES)) * LANES  # floats of what is laid out, in whole steps
        rows = -(-together // _TOGETHER) * _TOGETHER + 1  # and one that was unpacked
        return together, self._room + rows * line + _BLOCK * _SHARING * LANES, -(-count // _AT_ONCE) * _AT_ONCE * line


def ggml_product(compiled: Loops, packed: Bytes, *, kind: str, places: Places | None) -> Product:
    """Return the product with ``packed`` [rows, bytes], blocks of ggml's format ``kind``, each of whose numbers goes to
    the place that ``places`` has for its row, if that isn't null.
    """
    form, rows = FORMATS[kind], len(packed)
    blocks = packed.shape[1] // form.bytes
    assert packed.shape[1] == blocks * form.bytes
    assert places is None or places.shape == (rows,)
    laid = pointers(packed, None, None, None, None, None)
    work = LoopArguments(*laid, FORMAT_NUMBERS[kind], DTYPE_NUMBERS["float32"], rows, blocks)
    return Product(compiled, work, _GGML, rows=rows, columns=blocks * form.elements, tables={"places": places})


def plain_product(compiled: Loops, values: Bytes) -> Product:
    """Return the product with ``values`` [rows, bytes], float32 in whole runs of columns."""
    rows, columns = len(values), values.shape[1] // 4
    assert values.shape[1] == columns * 4
    assert columns % LANES == 0
    laid = pointers(values, None, None, None, None, None)
    work = LoopArguments(*laid, PLAIN_NUMBER, DTYPE_NUMBERS["float32"], rows, columns // LANES)
    return Product(compiled, work, _GGML, rows=rows, columns=columns)


def scaled_product(compiled: Loops, codes: Bytes, scales: Bytes, *, rows: int, layout: ScaleLayout) -> Product:
    """Return the product with a matrix of ``rows`` that rests in ``codes`` [rows, bytes] and ``scales`` [blocks down,
    bytes of a line of them].

    Codes of a table may be runs, several to a row of the matrix.
    """
    work, tables = scaled_work(codes, scales, layout)
    columns, over = divmod(work.rows * work.columns, rows)
    assert layout.inside == 0
    assert can_multiply_scaled(work.columns, work.block_columns)
    assert not over
    values, scale_table = tables
    work.dtype = DTYPE_NUMBERS["float32"]
    singles = None if values is None else np.ascontiguousarray(values.view(np.float32)[::32])
    table_of = {"values": singles, "codes": values, "scales": scale_table}
    return Product(compiled, work, _SCALED, rows=rows, columns=columns, tables=table_of)


def grouped_product(compiled: Loops, packed: PackedGroups, *, rows: int, columns: int, layout: GroupLayout) -> Product:
    """Return the product with integers in groups, of ``rows`` outputs and ``columns`` inputs."""
    codes, scales, zeros, order = packed
    bits, width = layout.bits, int(DTYPE_BYTES[layout.scale_dtype])
    groups = scales.nbytes // (rows * width)
    assert columns % LANES == 0
    assert rows * bits % 32 == 0
    assert codes.nbytes * 8 == rows * columns * bits
    assert zeros.nbytes * 8 == groups * rows * bits
    assert scales.nbytes == groups * rows * width
    assert groups > 0
    if order is None:
        assert groups == -(-columns // layout.group)
    else:
        assert order.dtype == np.int32
        assert order.shape == (columns,)
        assert 0 <= order.min() <= order.max() < groups
    work = LoopArguments(*pointers(codes, scales, zeros, None, order, None), bits, 0, rows, columns, groups)
    work.inside, work.block_columns, work.scale_kind = (
        layout.interleaved,
        layout.group,
        SCALE_NUMBERS[layout.scale_dtype],
    )
    work.above_run = layout.less_one
    return Product(compiled, work, _GROUPED, rows=rows, columns=columns, room=2 * _WIDE * groups)


@cache
def _team() -> c_void_p | None:
    """Return what calls a function in several of OpenMP's threads, torch's own; null where its OpenMP has no such."""
    try:
        return cast(ctypes.CDLL(None).GOMP_parallel, c_void_p)
    except AttributeError:
        return None
