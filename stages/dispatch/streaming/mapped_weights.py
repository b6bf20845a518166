"""Weights that the host uses where a private memory map of their shard has them, with nothing to bring and no copy.

That is the fastest way to serve weights that the page cache has room for, and the cheapest for an embedding, whose
forward touches one row a token: the system reads the pages that are touched and no others.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from offstage.pipeline.errors import named
from offstage.stages.checkpoints.direct_file import DirectFile
from offstage.stages.checkpoints.dtypes import torch_dtype
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.dispatch.streaming.places import TensorPlace
from offstage.stages.machine.aligned_memory import align_down, tensor_in


class MappedFile(DirectFile):
    """One shard, mapped whole; private, so that what a model writes into a weight stays out of the file.

    Who uses it has it ``check``: a page of a file cut short would end the process. The map lives as long as a tensor
    views it.
    """

    def __init__(self, file: ShardFile) -> None:
        super().__init__(file)
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        with named(file.path):
            self._memory = mmap.mmap(self.descriptor, file.size, flags=flags)

    def tensor(self, extent: Extent, advice: int) -> torch.Tensor:
        """Return the tensor at ``extent`` as a view of the map; a copy where its address isn't aligned.

        The system is told by ``advice`` how it will be used (``mmap.MADV_RANDOM``, ``mmap.MADV_WILLNEED``).
        """
        begin = align_down(extent.begin)
        if extent.end > begin:
            self._memory.madvise(advice, begin, extent.end - begin)
        return tensor_in(self._memory, extent.begin, torch_dtype(extent.dtype), extent.shape)


class MappedWeights:
    """The maps of one model's shards, whose files are closed with ``stack``."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._files: dict[ShardFile, MappedFile] = {}

    def use(self, places: Sequence[TensorPlace], *, looked_up: bool) -> list[MappedFile]:
        """Have the data of ``places`` be where maps of their shards have it; return the files, to check at each use.

        ``looked_up`` says that a use touches a few rows, anywhere; without it, that it reads all.
        """
        files = []
        for place in places:
            assert isinstance(place.at, Extent), place.name
            files.append(self._open(place.at.file))
            place.host = files[-1].tensor(place.at, mmap.MADV_RANDOM if looked_up else mmap.MADV_WILLNEED)
        return list(dict.fromkeys(files))

    def _open(self, file: ShardFile) -> MappedFile:
        if file not in self._files:
            self._files[file] = MappedFile(file)
            self._stack.callback(self._files[file].close)
        return self._files[file]
