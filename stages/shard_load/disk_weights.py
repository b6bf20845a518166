"""The tensors that wait on disk, as a mapping that reads each one when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from offstage.stages.checkpoints.packed import AtRest
from offstage.stages.checkpoints.readers import read_extent
from offstage.stages.shard_load.expert_rows import Rows, read_rows


class DiskWeights(Mapping[str, torch.Tensor]):
    """Every tensor of a model that lies on disk, by its name, tied names included.

    ``offloaded[name]`` reads the tensor now, as it is used, on the cpu, in new memory. A file that changed since it was
    recorded is a ``CheckpointError``.
    """

    def __init__(self, extents: Mapping[str, AtRest], rows: Mapping[str, Rows] | None = None) -> None:
        self._extents, self._rows = dict(extents), dict(rows or {})
        self._names = dict.fromkeys((*self._extents, *self._rows))

    def __getitem__(self, name: str) -> torch.Tensor:
        extent = self._extents.get(name)
        return read_rows(self._rows[name]) if extent is None else read_extent(extent)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    @property
    def extents(self) -> Mapping[str, AtRest]:
        """Where each tensor lies that is in one piece, for a reader that has buffers of its own."""
        return self._extents

    @property
    def rows(self) -> Mapping[str, Rows]:
        """Where the row of each expert lies, of every tensor that has one row an expert."""
        return self._rows
