"""Weights that wait on disk while the rest of a checkpoint is read.

A ``.bin`` file from before torch 1.6 has to be in memory whole to give any tensor. With the host's share of the
weights beside it the peak would be their sum; spilled and brought back after, it is the larger of the two.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch

from offstage.pipeline.errors import StorageError
from offstage.stages.checkpoints.dtypes import dtype_name, torch_dtype
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.readers import fill_from
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.machine.aligned_memory import byte_view, room_for
from offstage.stages.units import format_bytes


class Spill:
    """A folder of tensors that is gone when its context ends."""

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self._extents: dict[str, Extent] = {}
        self._addresses: dict[str, int] = {}

    def __enter__(self) -> Spill:
        try:
            self._parent.mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix=".tmp-spill-", dir=self._parent))
        except OSError as error:
            raise StorageError(f"{self._parent}: can't be written: {error.strerror}; set offload_folder") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Write ``tensor``, which then may be let go."""
        path = self._folder / f"{len(self._extents)}.dat"
        try:
            path.write_bytes(byte_view(tensor))
        except OSError as error:
            needed = f"{format_bytes(tensor.nbytes)} for {name!r}"
            raise StorageError(f"{path.parent}: spilling {needed} failed: {error.strerror}; free some space") from error
        file = ShardFile(path.name, path, tensor.nbytes, None, "")
        self._addresses[name] = tensor.data_ptr()
        self._extents[name] = Extent(file, 0, dtype_name(tensor.dtype), tuple(tensor.shape))

    def take_back(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor, in the order in which they were put, aligned as it was, and remove its file."""
        for name, extent in self._extents.items():
            tensor = room_for(extent.shape, torch_dtype(extent.dtype), offset=self._addresses[name]).tensor
            fill_from(extent, tensor)
            yield name, tensor
            del tensor
            extent.file.path.unlink()
