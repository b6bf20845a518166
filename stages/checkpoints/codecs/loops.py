"""The loops of ``loops.c`` as functions of arrays, where they have been compiled: what unpacks in one pass.

They run without Python's lock, and start no threads. A loop believes the sizes that it is given, so each is held
against the arrays first; what a file says was checked when it was opened. Every codec has its operators too, which give
the same bits: for machines without a compiler, and for the rare tensors that no loop is written for.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stages.checkpoints.codecs.ggml_formats import FORMATS
from stages.machine import compiled_code
from stages.units import DTYPE_BYTES

_SOURCE = Path(__file__).with_name("loops.c")
_DTYPES = {"bfloat16": 0, "float16": 1, "float32": 2}
_CODES = {"fp8": 0, "int8": 1, "fp4": 2, "int4": 3}
_OF_FOUR_BITS = ("fp4", "int4")
_FORMATS = {name: at for at, name in enumerate(("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k"))}

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.unsignedinteger[Any]]


class Loops:
    """The compiled ``library``. All arrays are contiguous, and those to be filled as large as what is written there."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._scaled = library.unpack_scaled
        self._scaled.argtypes = [c_int32, c_int32, c_void_p, c_void_p, c_void_p, *[c_int64] * 6]
        self._table_scaled = library.unpack_table_scaled
        self._table_scaled.argtypes = [c_int32, *[c_void_p] * 4, c_int64, c_int64]
        self._mxfp4 = library.unpack_mxfp4
        self._mxfp4.argtypes = [*[c_void_p] * 4, *[c_int64] * 3, c_int32]
        self._planes = library.merge_planes
        self._planes.argtypes = [*[c_void_p] * 3, c_int64]
        self._ggml = library.unpack_ggml
        self._ggml.argtypes = [c_int32, c_int32, c_void_p, c_void_p, c_int64, c_int64, c_void_p]
        for function in (self._scaled, self._table_scaled, self._mxfp4, self._planes, self._ggml):
            function.restype = None

    def has_dtype(self, dtype: str) -> bool:
        """Return whether what comes out can be of ``dtype``."""
        return dtype in _DTYPES

    def can_scale(self, code: str, dtype: str, block_columns: int) -> bool:
        """Return whether there is a loop for such codes, a scale for so many of them, to ``dtype``."""
        return dtype in _DTYPES and (code not in _OF_FOUR_BITS or block_columns % 2 == 0)

    def unpack_scaled(
        self, codes: Bytes, scales: Floats, made: Bytes, *, code: str, dtype: str, inside: int, block: tuple[int, int]
    ) -> None:
        """Write to ``made`` [rows, bytes of a row of ``dtype``] what comes of ``codes`` [rows, bytes].

        ``scales`` [blocks down, blocks across] has one for each ``block`` (rows, columns) of the matrix, from the block
        on that its row ``inside`` is in: the first of these.
        """
        rows = len(codes)
        columns = codes.shape[1] * (2 if code in _OF_FOUR_BITS else 1)
        across = scales.shape[1]
        height = min(block[0], inside + rows)  # what is declared may be more than fits in any number
        width = columns if across == 1 else min(block[1], columns)
        assert made.shape == (rows, columns * DTYPE_BYTES[dtype])
        assert across * width >= columns
        assert not rows or len(scales) > (inside + rows - 1) // height - inside // height
        self._scaled(
            _CODES[code], _DTYPES[dtype], *_pointers(codes, scales, made),
            rows, columns, inside, height, width, across,
        )  # fmt: skip

    def unpack_table_scaled(self, codes: Bytes, pairs: Numbers, scales: Floats, made: Bytes, *, dtype: str) -> None:
        """Write to ``made`` [runs, bytes of a run of ``dtype``] what comes of ``codes`` [runs, bytes] and ``scales``.

        ``pairs`` has the two float32 values of each byte as one number.
        """
        runs, run = codes.shape
        assert made.shape == (runs, 2 * run * DTYPE_BYTES[dtype])
        assert (pairs.shape, scales.shape) == ((256,), (runs,))
        self._table_scaled(_DTYPES[dtype], *_pointers(codes, pairs, scales, made), runs, 2 * run)

    def unpack_mxfp4(self, codes: Bytes, scales: Bytes, table: Numbers, made: Numbers) -> None:
        """Write to ``made`` [columns, rows], the lines of which may be part of longer ones, what comes of ``codes``
        [rows, bytes] and ``scales`` [rows, groups] by ``table``: for each scale and byte its two values as one number.
        """
        rows, groups = scales.shape
        assert (codes.shape, made.shape, table.shape) == ((rows, 16 * groups), (32 * groups, rows), (2**16,))
        assert made.strides[1] == made.itemsize == table.itemsize // 2
        line = made.strides[0] // made.itemsize
        self._mxfp4(*_pointers(codes, scales, table), made.ctypes.data, rows, groups, line, made.itemsize)

    def merge_planes(self, low: Bytes, high: Bytes, words: Numbers) -> None:
        """Write to ``words``, of two bytes, those that have their bytes in ``low`` and ``high``."""
        assert low.shape == high.shape == words.shape
        self._planes(*_pointers(low, high, words), words.size)

    def can_unpack_ggml(self, kind: str, dtype: str) -> bool:
        """Return whether there is a loop for ggml's format ``kind`` to ``dtype``."""
        return kind in _FORMATS and dtype in _DTYPES

    def unpack_ggml(
        self, blocks: Bytes, made: Bytes, *, kind: str, dtype: str, places: npt.NDArray[np.int64] | None
    ) -> None:
        """Write to the rows ``places`` of ``made``, all where that is null, what comes of ``blocks`` [rows, blocks in a
        row, bytes] of the format ``kind``.
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
        order = None if places is None else places.ctypes.data
        self._ggml(_FORMATS[kind], _DTYPES[dtype], *_pointers(blocks, made), rows, count, order)


def _pointers(*arrays: npt.NDArray[Any]) -> list[int]:
    """Return where ``arrays`` lie, each in one piece."""
    assert all(array.flags.c_contiguous for array in arrays)
    return [array.ctypes.data for array in arrays]


def build() -> None:
    """Have the loops compiled, once for this user and processor, where there is a compiler."""
    compiled_code.build(_SOURCE)


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
