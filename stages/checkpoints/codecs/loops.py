"""The loops of ``loops.c`` as functions of arrays, where they have been compiled: what unpacks in one pass.

They run without Python's lock, and start no threads. Reads may go before one in the same call: a thread that has read
would wait for the lock only to let go of it at once, and would read nothing meanwhile. A loop believes the sizes that
it is given, so each is held against the arrays first; what a file says was checked when it was opened. Every codec has
its operators too, which give the same bits: for machines without a compiler, and for the rare tensors that no loop is
written for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import Structure, byref, c_float, c_int32, c_int64, c_void_p, cast
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from offstage.stages.checkpoints.codecs.ggml_formats import FORMATS
from offstage.stages.machine import compiled_code
from offstage.stages.units import DTYPE_BYTES

_SOURCE = Path(__file__).with_name("loops.c")
_UNPACKERS = ("unpack_scaled", "unpack_mxfp4", "unpack_ggml")
_FITTERS = ("fit_with_least", "fit_around_zero")
_FUNCTIONS = (
    *_UNPACKERS, *_FITTERS, "merge_planes", "read_and_unpack", "multiply_packed", "way_of_bfloat16", "given_to_unpack",
)  # fmt: skip
DTYPE_NUMBERS = {"bfloat16": 0, "float16": 1, "float32": 2}
_CODES = {"fp8": 0, "int8": 1, "fp4": 2, "int4": 3, "table": 4}
_OF_EIGHT_BITS = ("fp8", "int8")
FORMATS_OF_LOOPS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k")
"""Those of ggml's formats that there are loops for."""
FORMAT_NUMBERS = {name: at for at, name in enumerate(FORMATS_OF_LOOPS)}
PLAIN_NUMBER = len(FORMATS_OF_LOOPS)
"""That of float32 as it is, whose products are made as theirs are."""
LANES = 32
"""In how many sums, side by side, each number of a product is added up."""
SCALE_NUMBERS = {"bfloat16": 0, "float16": 1, "float32": 2, "float8_e4m3fn": 3, "float8_e8m0fnu": 4, "uint8": 5}
SCALE_DTYPES = tuple(SCALE_NUMBERS)
"""What loops take as scales."""
_SCALES_OF_A_TABLE = 6

Way = Literal["floats", "pairs", "tiles"]
"""In which order products are added up: those of float32, or of pairs of bfloat16, or of tiles of such."""
_WAYS: Mapping[int, Way] = {0: "floats", 1: "pairs", 5: "tiles"}
WAY_NUMBERS = {way: number for number, way in _WAYS.items()}

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.unsignedinteger[Any]]
Floats = npt.NDArray[np.float32]
Places = npt.NDArray[np.int64]


_NUMBERS = (
    "kind", "dtype", "rows", "columns", "across", "inside", "block_rows", "block_columns", "scale_kind", "above_run",
)  # fmt: skip


class LoopArguments(Structure):
    """``Work`` in ``loops.c``."""

    _fields_ = [
        *((name, c_void_p) for name in ("codes", "scales", "above", "made", "table", "scale_table")),
        *((name, c_int64) for name in _NUMBERS),
        ("offset", c_float),
    ]


class Read(Structure):
    """What is read of the open ``file`` from ``offset`` on, to a ``place`` in a buffer: so many ``bytes``, or ``least``
    at least.
    """

    _fields_ = [(name, c_int64) for name in ("file", "offset", "bytes", "least", "place")]


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop and what it needs. Before it runs nothing of its arrays is looked at but where they are and how large."""

    library: ctypes.CDLL
    function: Any
    work: LoopArguments
    arrays: tuple[npt.NDArray[Any] | None, ...]
    tables: tuple[npt.NDArray[Any] | None, ...] = ()

    def run(self) -> None:
        """Unpack."""
        self.function(byref(self.work))


class ScaleLayout(NamedTuple):
    """What the codes of some rows of a matrix mean, and which scales are theirs: one of ``scale_dtype`` for each
    ``block`` (rows, columns) of the matrix, of whose rows the first of these is number ``inside``.

    ``values`` has the two float32 of each byte as one number, where the codes are of a ``table``. ``above`` is one
    float32 that all scales are divided by. Scales that are ``nested`` are codes (their 256 values, how many share one
    above them, what is added).
    """

    code: str
    scale_dtype: str
    inside: int
    block: tuple[int, int]
    values: Numbers | None = None
    above: Bytes | None = None
    nested: tuple[npt.NDArray[np.float32], int, float] | None = None


class LoopAfterReads:
    """Reads into a buffer, and a loop over what they bring: without Python's lock in between.

    ``at`` are the addresses of the buffer and of the target that ``loop`` was made for; it is run with any.
    """

    def __init__(self, loop: Loop, reads: Sequence[Read], *, at: tuple[int, int]) -> None:
        buffer, target = at
        self._call, self._function = loop.library.read_and_unpack, cast(loop.function, c_void_p)
        work = LoopArguments.from_buffer_copy(loop.work)
        work.codes, work.scales, work.made = work.codes - buffer, (work.scales or buffer) - buffer, work.made - target
        work.above = work.above and work.above - buffer
        self._reads, self._count, self._work, self._tables = (Read * len(reads))(*reads), len(reads), work, loop.tables

    def run(self, buffer: int, target: int) -> bool:
        """Read into the buffer at that address, and unpack to the target at that; return false where a read failed.

        What is there then is worth nothing.
        """
        done: int = self._call(self._reads, self._count, buffer, self._function, byref(self._work), target)
        return done == 0


class Loops:
    """The compiled ``library``. All arrays are contiguous, and those to be filled as large as what is written there."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.merge_planes.argtypes = [*[c_void_p] * 3, c_int64]
        library.fit_with_least.argtypes = [c_void_p, c_int64, c_float, c_float, c_void_p, c_void_p]
        library.fit_around_zero.argtypes = [c_void_p, c_int64, c_float, c_void_p]
        library.read_and_unpack.argtypes = [c_void_p, c_int64, *[c_void_p] * 4]
        library.read_and_unpack.restype = c_int32
        library.multiply_packed.argtypes = [c_void_p, c_int64, c_void_p]
        library.way_of_bfloat16.restype = c_int32
        best: Way = _WAYS[library.way_of_bfloat16()]
        self.has_tiles = best == "tiles"
        self.way_of_bfloat16: Way = "pairs" if best == "tiles" else best
        """In which way rows of bfloat16 are multiplied here, unless they are to be in tiles."""
        self.given_to_unpack: tuple[int, int] = (library.given_to_unpack(0), library.given_to_unpack(1))
        """For how many rows given a weight is unpacked that rests in rows, and one in columns."""
        unpackers = [getattr(library, name) for name in _UNPACKERS]
        for function in unpackers:
            function.argtypes = [c_void_p]
        fitters = [getattr(library, name) for name in _FITTERS]
        for function in (*unpackers, *fitters, library.merge_planes, library.multiply_packed):
            function.restype = None

    def can_scale(self, code: str, dtype: str, block_columns: int) -> bool:
        """Return whether there is a loop for such codes, a scale for so many of them, to ``dtype``."""
        return dtype in DTYPE_NUMBERS and (code in _OF_EIGHT_BITS or block_columns % 2 == 0)

    def scaled(self, codes: Bytes, scales: Bytes, made: Bytes, *, dtype: str, layout: ScaleLayout) -> Loop:
        """Return what writes to ``made`` [rows, bytes of a row of ``dtype``] what comes of ``codes`` [rows, bytes].

        ``scales`` [blocks down, bytes of a line of them], at any place, are those of ``layout`` from the block on that
        the first row is in.
        """
        work, tables = scaled_work(codes, scales, layout)
        assert made.shape == (work.rows, work.columns * DTYPE_BYTES[dtype])
        work.made, work.dtype = made.ctypes.data, DTYPE_NUMBERS[dtype]
        arrays = (codes, scales, layout.above, made)
        return Loop(self.library, self.library.unpack_scaled, work, arrays, tables)

    def mxfp4(self, codes: Bytes, scales: Bytes, table: Numbers, made: Numbers, *, dtype: str) -> Loop:
        """Return what writes to ``made`` [columns, rows], of ``dtype``, the lines of which may be part of longer ones,
        what comes of ``codes`` [rows, bytes] and ``scales`` [rows, groups] by ``table``: for each scale and byte its
        two values as one number.
        """
        rows, groups = scales.shape
        assert (codes.shape, made.shape, table.shape) == ((rows, 16 * groups), (32 * groups, rows), (2**16,))
        assert made.strides[1] == made.itemsize == table.itemsize // 2 == DTYPE_BYTES[dtype]
        line = made.strides[0] // made.itemsize
        places = (*pointers(codes, scales, None), made.ctypes.data, *pointers(table, None))
        work = LoopArguments(*places, 0, DTYPE_NUMBERS[dtype], rows, line, groups)
        return Loop(self.library, self.library.unpack_mxfp4, work, (codes, scales, made), (table,))

    def merge_planes(self, low: Bytes, high: Bytes, words: Numbers) -> None:
        """Write to ``words``, of two bytes, those that have their bytes in ``low`` and ``high``."""
        assert low.shape == high.shape == words.shape
        self.library.merge_planes(*pointers(low, high, words), words.size)

    def fit_with_least(self, runs: Floats, largest: int, least_at_most: float) -> tuple[Floats, Floats]:
        """Return the scales and the least values [n] of ``runs`` [n, 32], as ``ggml_packing`` fits them."""
        assert runs.shape[1] == 32
        scales, least = np.empty(len(runs), np.float32), np.empty(len(runs), np.float32)
        given, *made = pointers(runs, scales, least)
        self.library.fit_with_least(given, len(runs), largest, least_at_most, *made)
        return scales, least

    def fit_around_zero(self, runs: Floats, largest: int) -> Floats:
        """Return the scales [n] of ``runs`` [n, 16], as ``ggml_packing`` fits them."""
        assert runs.shape[1] == 16
        scales = np.empty(len(runs), np.float32)
        given, made = pointers(runs, scales)
        self.library.fit_around_zero(given, len(runs), largest, made)
        return scales

    def can_unpack_ggml(self, kind: str, dtype: str) -> bool:
        """Return whether there is a loop for ggml's format ``kind`` to ``dtype``."""
        return kind in FORMAT_NUMBERS and dtype in DTYPE_NUMBERS

    def ggml(self, blocks: Bytes, made: Bytes, *, kind: str, dtype: str, places: npt.NDArray[np.int64] | None) -> Loop:
        """Return what writes to the rows ``places`` of ``made``, all where that is null, what comes of ``blocks``
        [rows, blocks in a row, bytes] of the format ``kind``.
        """
        rows, count, size = blocks.shape
        form = FORMATS[kind]
        assert (size, made.shape[1]) == (form.bytes, count * form.elements * DTYPE_BYTES[dtype])
        if places is None:
            assert len(made) == rows
        else:
            assert places.dtype == np.int64
            assert places.shape == (rows,)
            assert not rows or 0 <= places.min() <= places.max() < len(made)
        laid = pointers(blocks, None, None, made, places, None)
        work = LoopArguments(*laid, FORMAT_NUMBERS[kind], DTYPE_NUMBERS[dtype], rows, count)
        return Loop(self.library, self.library.unpack_ggml, work, (blocks, made), (places,))


def can_multiply_scaled(columns: int, block_columns: int) -> bool:
    """Return whether so many columns are whole runs, each, or either half of it, with one scale."""
    whole = block_columns % LANES == 0 or block_columns >= columns or block_columns == LANES // 2
    return columns % LANES == 0 and whole


def scaled_work(
    codes: Bytes, scales: Bytes, layout: ScaleLayout
) -> tuple[LoopArguments, tuple[npt.NDArray[Any] | None, ...]]:
    """Return what a loop is to know of ``codes`` [rows, bytes] and ``scales``, and the tables that it points to."""
    above, inside, values = layout.above, layout.inside, layout.values
    rows = len(codes)
    columns = codes.shape[1] * (1 if layout.code in _OF_EIGHT_BITS else 2)
    across = scales.shape[1] // int(DTYPE_BYTES[layout.scale_dtype])
    height = min(layout.block[0], inside + rows)  # what is declared may be more than fits in any number
    width = columns if across == 1 else min(layout.block[1], columns)
    assert across * width >= columns
    assert not rows or len(scales) > (inside + rows - 1) // height - inside // height
    assert (values is not None and values.shape == (256,)) == (layout.code == "table")
    scale_table, run, offset = layout.nested or (None, 1, 0.0)
    if scale_table is not None:
        assert scale_table.dtype == np.float32
        assert (scale_table.shape, height, across) == ((256,), 1, 1)
        assert above is not None
        assert not rows or above.nbytes >= 4 * ((inside + rows - 1) // run - inside // run + 1)
    else:
        assert above is None or above.nbytes == 4
    tables = values, scale_table
    kind = SCALE_NUMBERS[layout.scale_dtype] if layout.nested is None else _SCALES_OF_A_TABLE
    work = LoopArguments(
        *pointers(codes, scales, above, None, *tables), _CODES[layout.code], 0, rows, columns, across, inside, height,
        width, kind, run, offset,
    )  # fmt: skip
    return work, tables


def pointers(*arrays: npt.NDArray[Any] | None) -> list[int | None]:
    """Return where ``arrays`` lie, each in one piece; null for one that isn't there."""
    assert all(array is None or array.flags.c_contiguous for array in arrays)
    return [None if array is None else array.ctypes.data for array in arrays]


def begin_building() -> None:
    """Have ``build`` begin beside what this process does, if there is memory for that."""
    compiled_code.begin(_SOURCE, _FUNCTIONS)


def build() -> None:
    """Have the loops compiled, once for this user and processor, where there is a compiler."""
    compiled_code.build(_SOURCE, _FUNCTIONS)


def identity() -> str:
    """Return what unpacks here, as a name: rates that were measured go by it."""
    return compiled_code.identity(_SOURCE) if loops() else "operators"


def loops() -> Loops | None:
    """Return the loops; null where they weren't compiled."""
    library = compiled_code.load(_SOURCE)
    return None if library is None else _typed(library)


@cache
def _typed(library: ctypes.CDLL) -> Loops:
    return Loops(library)
