"""Where a tensor's bytes lie. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.units import DTYPE_BYTES, tensor_bytes

MAX_ELEMENTS = 2**63 - 1
"""As many as a tensor can have, and as large as an offset can be."""


def misfit(entry: Extent, what: str) -> CheckpointError:
    """Return the error of a checkpoint that can't be right: ``what`` is wrong, of which ``entry`` has a part."""
    return CheckpointError(f"{entry.file.path}: {what}; get the checkpoint again")


def are_counts(values: object) -> bool:
    """Return whether ``values``, as JSON gives them, are a list of numbers that can be sizes or offsets."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= MAX_ELEMENTS for value in values)


def is_shape(values: object) -> bool:
    """Return whether ``values``, as JSON gives them, are the shape of a tensor that there can be."""
    sizes = values if isinstance(values, list) else []
    return are_counts(values) and math.prod(size for size in sizes if size) <= MAX_ELEMENTS


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a file's header tells of a tensor, and ``data``: of one that is read with the headers, its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class Extent:
    """Where one tensor's bytes lie: ``file``, the offset ``begin`` in it, the dtype as torch names it, the shape.

    A ``.bin`` tells no offsets, and there ``begin`` is 0.
    """

    file: ShardFile
    begin: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """The size of the tensor."""
        return tensor_bytes(self.shape, self.dtype)

    @property
    def end(self) -> int:
        """The offset of the first byte after the tensor's."""
        return self.begin + self.bytes

    @property
    def header(self) -> TensorHeader:
        """What a file's header tells of it."""
        return TensorHeader(self.dtype, self.shape)

    @property
    def flat(self) -> Extent:
        """The same elements in one dimension."""
        return Extent(self.file, self.begin, self.dtype, (math.prod(self.shape),))

    @property
    def as_bytes(self) -> Extent:
        """The same bytes, as ``uint8`` in one dimension."""
        return Extent(self.file, self.begin, "uint8", (self.bytes,))

    def span_of(self, begin: int, end: int) -> Extent:
        """Return the bytes of the elements ``begin`` to ``end``, as ``uint8`` in one dimension."""
        size = DTYPE_BYTES[self.dtype]
        first = int(begin * size)
        return Extent(self.file, self.begin + first, "uint8", (int(end * size) - first,))

    def rows(self, begin: int, end: int) -> Extent:
        """Return the rows ``begin`` to ``end`` of the first dimension."""
        row = tensor_bytes(self.shape[1:], self.dtype)
        return Extent(self.file, self.begin + begin * row, self.dtype, (end - begin, *self.shape[1:]))
