"""Parts of packed tensors that were read into memory, where they wait as they rest on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

import numpy as np

from stages.checkpoints.extents import Extent
from stages.checkpoints.shard_files import ShardFile
from stages.machine.aligned_memory import Bytes

if TYPE_CHECKING:
    from stages.checkpoints.packed import PackedTensor


@dataclass(frozen=True, slots=True)
class MemoryFile(ShardFile):
    """A stretch of a shard that is in memory: its bytes from ``start`` on are ``data``, to be read only.

    A codec sees no difference: extents keep the offsets and the path that they have in the shard.
    """

    start: int = 0
    data: Bytes = field(default_factory=lambda: np.empty(0, np.uint8), compare=False, repr=False)

    def bytes_of(self, span: Extent) -> Bytes:
        """Return the bytes of ``span``, where they lie."""
        return self.data[span.begin - self.start : span.end - self.start]


def in_memory(tensor: PackedTensor, parts: Sequence[Bytes]) -> PackedTensor:
    """Return ``tensor`` as one whose ``parts`` are in memory, each as its extent has it."""
    placed = zip(tensor.parts, parts, strict=True)
    return replace(tensor, parts=tuple(replace(part, file=_memory_file(part, data)) for part, data in placed))


def _memory_file(part: Extent, data: Bytes) -> MemoryFile:
    known = {each.name: getattr(part.file, each.name) for each in fields(ShardFile)}
    kept = data.view()
    kept.flags.writeable = False
    return MemoryFile(**known, start=part.begin, data=kept)
