"""Host memory of an exact size: private, page-aligned, and of one piece.

That is what a device can be given to copy from directly. torch's own pinned memory is rounded up to a power of two and
never given back, which no budget survives; memory that is registered with the device is exactly as large as it is.
"""

from __future__ import annotations

import math
import mmap

import numpy as np
import numpy.typing as npt
import torch

from stages.shard_load.direct import align_up

Bytes = npt.NDArray[np.uint8]
TENSOR_ALIGNMENT = 64
"""Where a tensor may begin: torch aligns its own that way on the host."""


def private_memory(size: int) -> mmap.mmap:
    """Return ``size`` bytes of private anonymous memory, in huge pages where the system has them.

    Python's default is shared memory, which counts as shmem and gets no huge pages.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def private_bytes(size: int) -> Bytes:
    """Return an array of ``size`` bytes of private memory, which is given back when its last view is gone."""
    return np.frombuffer(private_memory(max(size, 1)), np.uint8)


class HostBlock:
    """The weights that wait on the host for an accelerator, side by side in memory of their own.

    ``memory`` is as large as the tensors of the sizes given, each aligned, and rounded up to whole pages. Tensors are
    views of it: it lives as long as the last of them.
    """

    def __init__(self, tensor_bytes: list[int]) -> None:
        self.memory = private_bytes(align_up(sum(map(_aligned, tensor_bytes))))
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor whose place is in the block; beyond its end in memory of the tensor's own."""
        count = math.prod(shape)
        begin, end = self._used, self._used + count * dtype.itemsize
        if not count or end > self.memory.nbytes:
            return torch.empty(shape, dtype=dtype)
        self._used = _aligned(end)
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=begin).view(shape)

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` if its place is in the block already, else a copy whose place is."""
        return tensor if tensor in self else self.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)

    def __contains__(self, tensor: object) -> bool:
        begin = self.memory.ctypes.data
        return isinstance(tensor, torch.Tensor) and begin <= tensor.data_ptr() < begin + self.memory.nbytes


def _aligned(size: int) -> int:
    return -(-size // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
