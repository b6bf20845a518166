"""Where a tensor's bytes lie, and reading them from there."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from stages.checkpoints.shard_files import ShardFile, opened_shard, read_into


@dataclass(frozen=True, slots=True)
class Extent:
    """Where one tensor's bytes lie: ``file``, the offset ``begin`` in it, the dtype by name, the shape."""

    file: ShardFile
    begin: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """The offset of the first byte after the tensor's."""
        return self.begin + math.prod(self.shape) * torch_dtype(self.dtype).itemsize


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype that torch calls ``name``."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous cpu ``tensor`` as writable bytes."""
    flat = tensor.detach().view(-1) if tensor.dim() else tensor.detach().reshape(1)
    return flat.view(torch.uint8).numpy().data


def read_extent(extent: Extent) -> torch.Tensor:
    """Return the tensor that lies at ``extent``, on the cpu, in new memory."""
    tensor = torch.empty(extent.shape, dtype=torch_dtype(extent.dtype))
    if tensor.numel():
        with opened_shard(extent.file) as descriptor:
            read_into(descriptor, byte_view(tensor), offset=extent.begin, path=extent.file.path)
    return tensor
