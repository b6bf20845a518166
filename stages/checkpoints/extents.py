"""Where a tensor's bytes lie. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stages.checkpoints.shard_files import ShardFile
from stages.units import DTYPE_BYTES


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
        return int(math.prod(self.shape) * DTYPE_BYTES[self.dtype])

    @property
    def end(self) -> int:
        """The offset of the first byte after the tensor's."""
        return self.begin + self.bytes
