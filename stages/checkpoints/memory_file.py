"""Parts of packed tensors that were read into memory, where they wait as they rest on disk."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
import torch

from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.machine.aligned_memory import Bytes


@dataclass(frozen=True, slots=True)
class MemoryFile(ShardFile):
    """A stretch of a shard that is in memory: its bytes from ``start`` on are ``data``, to be read only.

    A codec sees no difference: extents keep the offsets and the path that they have in the shard. ``memory`` is the
    whole piece of memory that the data are in: an accelerator copies from there by itself once all of it is pinned.
    """

    start: int = 0
    data: Bytes = field(default_factory=lambda: np.empty(0, np.uint8), compare=False, repr=False)
    memory: Bytes = field(default_factory=lambda: np.empty(0, np.uint8), compare=False, repr=False)

    def bytes_of(self, span: Extent) -> Bytes:
        """Return the bytes of ``span``, where they lie."""
        return self.data[span.begin - self.start : span.end - self.start]

    def tensor_of(self, span: Extent) -> torch.Tensor:
        """Return the bytes of ``span``, where they lie, as a tensor; it is to be read only too."""
        begin = self.bytes_of(span).ctypes.data - self.memory.ctypes.data
        return torch.from_numpy(self.memory[begin : begin + span.bytes])


def memory_file(part: Extent, data: Bytes, memory: Bytes | None = None) -> MemoryFile:
    """Return the stretch of the file of ``part`` that is ``part``, whose bytes are ``data``, in a larger ``memory``."""
    known = {each.name: getattr(part.file, each.name) for each in fields(ShardFile)}
    kept = data.view()
    kept.flags.writeable = False
    return MemoryFile(**known, start=part.begin, data=kept, memory=data if memory is None else memory)
