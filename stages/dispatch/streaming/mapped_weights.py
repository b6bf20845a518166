"""Weights that the host uses where a memory map of their shard has them, with nothing to bring."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.mapped_file import MappedFile
from offstage.stages.checkpoints.packed import AtRest
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.dispatch.streaming.places import TensorPlace


class MappedWeights:
    """The maps of one model's shards; a context manager that closes the files."""

    def __init__(self, extents: Mapping[str, AtRest]) -> None:
        self._extents = extents
        self._stack = ExitStack()
        self._files: dict[ShardFile, MappedFile] = {}

    def __enter__(self) -> MappedWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def use(self, places: Sequence[TensorPlace], *, looked_up: bool) -> list[MappedFile]:
        """Have the data of ``places`` be where maps of their shards have it; return the files, to check at each use.

        ``looked_up`` says that a use touches a few rows, anywhere; without it, that it reads all.
        """
        files = []
        for place in places:
            extent = self._extents[place.name]
            assert isinstance(extent, Extent), place.name
            file = self._open(extent.file)
            file.advise(extent, mmap.MADV_RANDOM if looked_up else mmap.MADV_WILLNEED)
            place.host = file.tensor(extent)
            files.append(file)
        return list(dict.fromkeys(files))

    def _open(self, file: ShardFile) -> MappedFile:
        if file not in self._files:
            self._files[file] = MappedFile(file)
            self._stack.callback(self._files[file].close)
        return self._files[file]
