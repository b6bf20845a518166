"""The tensors that wait on disk, as a mapping that reads each one when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from stages.checkpoints.extents import Extent
from stages.checkpoints.readers import read_extent


class DiskWeights(Mapping[str, torch.Tensor]):
    """Every tensor of a model that lies on disk, by its name, tied names included.

    ``offloaded[name]`` reads the tensor now, on the cpu, in new memory. A file that changed since it was
    recorded is a ``CheckpointError``.
    """

    def __init__(self, extents: Mapping[str, Extent]) -> None:
        self._extents = dict(extents)

    def __getitem__(self, name: str) -> torch.Tensor:
        return read_extent(self._extents[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._extents)

    def __len__(self) -> int:
        return len(self._extents)

    def __contains__(self, name: object) -> bool:
        return name in self._extents

    @property
    def extents(self) -> Mapping[str, Extent]:
        """Where each tensor lies, for a reader that has buffers of its own."""
        return self._extents
