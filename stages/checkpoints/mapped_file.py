"""Weights used where they lie in a memory map of their shard, without a copy.

That is the fastest way to serve weights that the page cache has room for, and the cheapest for an embedding, whose
forward touches one row a token: the system reads the pages that are touched and no others.
"""

from __future__ import annotations

import mmap

import torch

from offstage.pipeline.errors import named
from offstage.stages.checkpoints.direct_file import DirectFile
from offstage.stages.checkpoints.dtypes import torch_dtype
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.machine.aligned_memory import align_down, tensor_in


class MappedFile:
    """One shard, mapped whole; private, so that what a model writes into a weight stays out of the file."""

    def __init__(self, file: ShardFile) -> None:
        self._file = DirectFile(file)
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        with named(file.path):
            self._memory = mmap.mmap(self._file.descriptor, file.size, flags=flags)

    def check(self) -> None:
        """Raise a ``CheckpointError`` if the file has changed: a page of a file cut short would end the process."""
        self._file.check()

    def tensor(self, extent: Extent) -> torch.Tensor:
        """Return the tensor at ``extent`` as a view of the map; a copy where its address isn't aligned."""
        return tensor_in(self._memory, extent.begin, torch_dtype(extent.dtype), extent.shape)

    def advise(self, extent: Extent, advice: int) -> None:
        """Tell the system how ``extent`` will be used (``mmap.MADV_RANDOM``, ``mmap.MADV_WILLNEED``)."""
        begin = align_down(extent.begin)
        if extent.end > begin:
            self._memory.madvise(advice, begin, extent.end - begin)

    def close(self) -> None:
        """Close the file; the map lives as long as a tensor views it."""
        self._file.close()
